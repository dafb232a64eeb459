"""How a map-style loader names what it reads: batches of indices, single indices, or batches as one index."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from accel_train.data.batch_shard import BatchSamplerShard, EpochRest
from accel_train.data.stateful import is_stateful

if TYPE_CHECKING:
    from accel_train.data.samplers import OrderState

_SAMPLING = ("batch_size", "shuffle", "sampler", "drop_last", "generator")
INDEXING = frozenset({"batch_size", "shuffle", "sampler", "drop_last", "batch_sampler"})
"""The arguments of a torch loader that say what it reads; `IndexSource.options` replaces them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexSource:
    """The indices that a loader reads in an epoch.

    Args:
        shard: This rank's batches of indices.
        collates: Whether a batch of indices is a batch of the loader. Otherwise (`batch_size=None`) the
            loader passes on what the dataset gives for each index, or for a whole batch of indices.
        single: Whether the dataset is asked for one index at a time, each of which is a batch.
    """

    shard: BatchSamplerShard
    collates: bool = True
    single: bool = False

    def options(self, position: int | None = None, order: OrderState | None = None) -> dict[str, Any]:
        """Return the arguments with which a torch loader reads these indices."""
        if position is None and not self.single:
            indices: BatchSampler = self.shard
        else:
            indices = EpochRest(self.shard, position or 0, order, single=self.single)
        return {"batch_sampler": indices} if self.collates else {"sampler": indices, "batch_size": None}


def index_source(
    dataset: Any,
    options: dict[str, Any],
    *,
    num_processes: int = 1,
    process_index: int = 0,
    split_batches: bool = False,
    even_batches: bool = True,
    static_shapes: bool = False,
) -> IndexSource:
    """Find the indices behind the arguments of a torch loader, and shard them."""
    batch_sampler = options.get("batch_sampler")
    # Torch decides what its arguments mean.
    sampling = {name: options[name] for name in _SAMPLING if name in options}
    plain = DataLoader(dataset, batch_sampler=batch_sampler, **sampling)
    collates = plain.batch_sampler is not None
    batches: Any = plain.batch_sampler if collates else plain.sampler
    single = not collates and not isinstance(batches, BatchSampler)
    if isinstance(batches, EpochRest):
        single, batches = batches.single, batches.batch_sampler
    if isinstance(batches, BatchSamplerShard):
        if batches.num_processes > 1 or num_processes == 1:
            return IndexSource(shard=batches, collates=collates, single=single)
        batches = batches.batch_sampler
    elif single:
        if split_batches and num_processes > 1:
            raise ValueError(
                "split_batches=True cannot split the batches that a dataset makes itself (batch_size=None). "
                "Let the main process read and split them, with dispatch_batches=True."
            )
        batches = BatchSampler(cast("Any", batches), 1, drop_last=False)
    shard = BatchSamplerShard(
        batches, num_processes, process_index, split_batches, even_batches, static_shapes=static_shapes
    )
    return IndexSource(shard=shard, collates=collates, single=single)


_COPIED_OPTIONS = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
    "in_order",
)


def loader_options(dataloader: DataLoader[Any]) -> dict[str, Any]:
    """Return the arguments that make the same torch loader again, with its dataset."""
    options = {name: getattr(dataloader, name) for name in _COPIED_OPTIONS}
    if dataloader.pin_memory_device:
        options["pin_memory_device"] = dataloader.pin_memory_device
    if is_stateful(dataloader):
        options["snapshot_every_n_steps"] = cast("Any", dataloader).snapshot_every_n_steps
    if isinstance(dataloader.dataset, IterableDataset):
        return {**options, "batch_size": dataloader.batch_size, "drop_last": dataloader.drop_last}
    if dataloader.batch_sampler is None:
        return {**options, "batch_size": None, "sampler": dataloader.sampler}
    return {**options, "batch_sampler": dataloader.batch_sampler}
