"""Integration with Ray Train's `TorchTrainer`: report checkpoints, resume from them, read Ray Data.

Every function raises `MissingDependencyError` without Ray Train, and `SettingsError` outside a worker of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader, IterableDataset

from accel_state.errors import MissingDependencyError, SettingsError
from accel_train.data.prepare import prepare_data_loader

if TYPE_CHECKING:
    from accel_train.accelerator import Accelerator


def report(
    accelerator: Accelerator,
    metrics: Mapping[str, Any],
    checkpoint: str | PathLike[str] | None = None,
) -> None:
    """Report metrics, and a checkpoint from which Ray Train resumes when a worker dies after this call.

    Call it on every rank. The folder of `accelerator.save_state` must be on storage that all ranks
    share. The main process uploads it; each rank waits until Ray Train has registered it, so that a failure
    in the very next step loses nothing.

    Args:
        accelerator: Any `Accelerator` of this worker.
        metrics: Values by name, without tensors; Ray Train keeps the values of the main process.
        checkpoint: The folder that `save_state` has returned; None to report metrics alone.

    Example:
        >>> report(Accelerator(), {"loss": 1.0})  # doctest: +SKIP
    """
    train = _ray_train()
    folder = None
    if checkpoint is not None:
        accelerator.wait_for_everyone()  # The other ranks may still write.
        folder = train.Checkpoint(fspath(checkpoint)) if accelerator.is_main_process else None
    train.report(dict(metrics), checkpoint=folder)
    if checkpoint is not None:
        train.get_all_reported_checkpoints(consistency_mode=train.CheckpointConsistencyMode.COMMITTED)


def load_state(accelerator: Accelerator) -> bool:
    """Load the last registered checkpoint, if there is one.

    To be called on every rank, after `prepare` and `register_for_checkpointing`.

    Args:
        accelerator: The `Accelerator` that has prepared the objects to load.

    Returns:
        Whether there was one; False in a new run.

    Example:
        >>> load_state(Accelerator())  # doctest: +SKIP
        False
    """
    checkpoint = _ray_train().get_checkpoint()
    if checkpoint is None:
        return False
    with checkpoint.as_directory() as folder:
        accelerator.load_state(folder)
        accelerator.wait_for_everyone()  # The folder may be a copy that ends with the block.
    return True


def shard_loader(accelerator: Accelerator, name: str = "train", **options: Any) -> Any:
    """Return a prepared loader of this rank's shard of a Ray Data dataset.

    Ray Data has sharded the rows across the ranks: they are not sharded again, and `prepare` returns this
    loader as it is. Batches are moved to the device of the `Accelerator`.

    Args:
        accelerator: The `Accelerator` of this worker.
        name: The name of the dataset in `TorchTrainer(datasets=...)`.
        **options: Passed to `iter_torch_batches`, such as `batch_size=32`.

    Raises:
        SettingsError: The trainer has no dataset of that name.

    Example:
        >>> for batch in shard_loader(Accelerator(), batch_size=8):  # doctest: +SKIP
        ...     batch["x"].shape
        torch.Size([8, 2])
    """
    try:
        shard = _ray_train().get_dataset_shard(name)
    except KeyError as error:
        raise SettingsError(f"shard_loader: {error.args[0]}") from None
    if shard is None:
        raise SettingsError("shard_loader: the TorchTrainer has no datasets.")
    loader = DataLoader(_Shard(shard, {"device": "cpu", **options}), batch_size=None)
    # As rank 0 of a world size of 1, so that nothing is sharded again.
    return prepare_data_loader(
        loader, accelerator.device, num_processes=1, process_index=0, put_on_device=True
    )


@dataclass(eq=False, repr=False)
class _Shard(IterableDataset[Any]):
    shard: Any
    options: dict[str, Any]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.shard.iter_torch_batches(**self.options))


def _ray_train() -> Any:
    """Return the module `ray.train`, in a worker."""
    try:
        train = import_module("ray.train")
    except ImportError as error:
        raise MissingDependencyError(
            f"accel_train.ray needs Ray Train ({error}): `pip install 'accel-train[ray]'`."
        ) from None
    try:
        train.get_context()
    except RuntimeError as error:
        raise SettingsError(
            f"accel_train.ray only works within the train_loop_per_worker of a TorchTrainer: {error}"
        ) from None
    return train
