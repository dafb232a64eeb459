"""Facets of `Accelerator`: gather results without padding, log them to trackers."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

import torch

from accel_ops import collectives, pad
from accel_ops.tree import recursively_apply
from accel_state import runtime
from accel_state.errors import CheckpointError, DistributedOperationException
from accel_state.logging import get_logger
from accel_state.remote import AnyPath
from accel_train.accelerator.run import Facet
from accel_train.checkpoint import layout

if TYPE_CHECKING:
    from accel_trackers.general import GeneralTracker
    from accel_trackers.session import Trackers, TrackerSession


T = TypeVar("T")


logger = get_logger(__name__)


class CollectFacet(Facet):
    """Collectives over nested data."""

    __slots__ = ()

    def gather(self, tensor: T) -> T:
        """Concatenate tensors of all processes along their first dimension, on every process.

        Args:
            tensor: A tensor, or nested lists, tuples and dicts of tensors; 0-d ones become one row each.
                First dimensions may differ between processes.

        Returns:
            The same structure, rows in the order of the processes.
        """
        return collectives.gather(tensor)

    def gather_for_metrics(
        self,
        input_data: T,
        use_gather_object: bool = False,
    ) -> T:
        """Gather the results of all processes for the batch that a prepared loader yielded last.

        Loaders pad the last batches so that all processes have equally many samples. These repeated samples
        are removed, so that every sample of the dataset occurs exactly once per epoch. Processes that compute
        parts of the same layers have the same samples, and only one of them counts. Of an incomplete last
        batch, at most as many rows are kept as it has samples.

        Args:
            input_data: Tensors as for `gather`, with one row per sample of the batch; 0-d ones are gathered
                as they are. Or a list or plain tuple with one object per sample. A named tuple, a tuple of
                containers, and a list of tensors and other objects are treated as fields.
            use_gather_object: Gather as objects even if there are only tensors.

        Returns:
            Tensors gathered as by `gather`, or the objects of all processes in one list. With a single
            process, the objects unchanged.

        Raises:
            ValueError: There is padding in the batch, and `input_data` is neither tensors nor one object per
                sample.
            DistributedOperationException: The same error on another process, or the data of the processes
                does not match.

        Example:
            >>> import torch
            >>> from accel_train import Accelerator
            >>> accelerator = Accelerator(cpu=True)
            >>> loader = accelerator.prepare(torch.utils.data.DataLoader(range(5), batch_size=2))
            >>> torch.cat([accelerator.gather_for_metrics(batch) for batch in loader])
            tensor([0, 1, 2, 3, 4])
        """
        parts = self._parts
        sharding, replicas = parts.strategy.sharding, parts.strategy.replicas
        if replicas is not None:
            logger.warning_once(
                "gather_for_metrics() covers only the samples of %s, not those of other groups.",
                replicas.covers,
            )
        return gather_real(
            input_data,
            parts.gradient_state.active_dataloader,
            as_objects=use_gather_object,
            repeats=sharding.repeats if sharding.num_shards < parts.process.num_processes else None,
        )

    def reduce(self, tensor: T, reduction: Literal["sum", "mean", "none"] = "sum", scale: float = 1.0) -> T:
        """Combine tensors of all processes, element by element, on every process.

        Args:
            tensor: A tensor or nested tensors, of the same shapes on all processes.
            reduction: `"sum"`, `"mean"` or `"none"`.
            scale: The factor of the result.
        """
        return collectives.reduce(tensor, reduction, scale)

    def pad_across_processes(
        self,
        tensor: T,
        dim: int = 0,
        pad_index: int = 0,
        pad_first: bool = False,
    ) -> T:
        """Pad the tensors of all processes to the same length along a dimension.

        Args:
            tensor: A tensor or nested tensors.
            dim: The dimension to pad.
            pad_index: The value to pad with.
            pad_first: Whether to pad at the beginning instead of the end.
        """
        return pad.pad_across_processes(tensor, dim=dim, pad_index=pad_index, pad_first=pad_first)


def gather_real(data: Any, loader: Any, *, as_objects: bool = False, repeats: bool | None = None) -> Any:
    """Gather the results for the real (unpadded) samples of a loader's last batch: `gather_for_metrics`.

    Every rank keeps one row per real sample of its batch, and these rows are gathered; ranks may have
    different numbers. Data whose row count differs from the batch size is gathered in full, and cut to
    the number of samples in the last batches of all ranks: Accelerate does that, and
    `transformers.Trainer` relies on it for the weight of the last batch's loss.

    Without an active loader, nothing is removed. If ranks share batches, `repeats` is whether this rank
    has the same samples as another rank, and so contributes nothing.
    """
    # 1. Trim this rank's data to its real samples.
    real, is_padded = _count_real_samples(loader)
    if as_objects or not all_tensors(data):
        return _gather_objects(data, loader, real, is_padded=is_padded, counts=not repeats)
    is_untrimmed: list[bool] = []  # for each tensor, whether its row count differs from the batch's

    def trim(tensor: torch.Tensor) -> torch.Tensor:
        is_untrimmed.append(real is not None and tensor.dim() > 0 and _has_other_rows(loader, len(tensor)))
        if real is not None and not is_untrimmed[-1]:
            tensor = trim_tensors(tensor, real=real)
        if repeats is None:
            return tensor
        rows = tensor.reshape(1) if tensor.dim() == 0 else tensor
        return rows[:0] if repeats else rows

    # 2. Gather, and cut the tensors that could not be trimmed before.
    gathered = collectives.gather(recursively_apply(trim, data))
    if not any(is_untrimmed):
        return gathered
    cuts = iter(is_untrimmed)
    return recursively_apply(lambda tensor: tensor[: loader.remainder] if next(cuts) else tensor, gathered)


def _count_real_samples(loader: Any) -> tuple[int | None, bool]:
    """Return the number of real samples in this rank's batch (None for all), and whether it is padded."""
    if loader is None:
        return None, False
    if loader.real_in_batch is not None:
        return loader.real_in_batch, True
    if not (loader.end_of_dataloader and loader.remainder > 0):
        return None, False
    rows = loader.batch_size_seen
    # A batch may have more rows than samples, such as chosen and rejected answers of preference data.
    return (None if rows is None else min(rows, loader.remainder)), False


def _has_other_rows(loader: Any, rows: int) -> bool:
    """Return whether the number of rows differs from the padded size of the last batch."""
    return loader.remainder > 0 and loader.batch_size_seen not in {None, rows}


def _gather_objects(data: Any, loader: Any, real: int | None, *, is_padded: bool, counts: bool) -> Any:
    # 1. Trim this rank's objects; an error is exchanged, so that every rank raises.
    problem: ValueError | None = None
    has_rows = has_object_per_sample(data)
    is_untrimmed = real is not None and has_rows and _has_other_rows(loader, len(data))
    try:
        if not is_untrimmed and real is not None and (is_padded or has_rows or torch.is_tensor(data)):
            data = trim_objects(data, real=real)
    except ValueError as error:
        problem = error
    contribution = (problem and str(problem), data if counts else None, counts, is_untrimmed)
    # 2. Gather, and raise if any rank has a problem.
    gathered: list[tuple[str | None, Any, bool, bool]] = collectives.gather_object([contribution])
    try:
        if problem is not None:
            raise problem
    finally:
        del problem  # else a cycle: its traceback holds this frame
    for rank, (text, *_) in enumerate(gathered):
        if text is not None:
            raise DistributedOperationException(f"Rank {rank}: {text}")
    # 3. Join the values of the ranks that count.
    if len(gathered) == 1:
        return data[: loader.remainder] if is_untrimmed else data
    values = [value for _, value, counted, _ in gathered if counted]
    if all(isinstance(value, list | tuple) for value in values):
        limit = loader.remainder if any(untrimmed for *_, untrimmed in gathered) else None
        return [item for value in values for item in value][:limit]
    return values if len(values) > 1 else values[0]


def all_tensors(data: object) -> bool:
    """Return whether nested data consists of tensors only.

    Example:
        >>> all_tensors({"loss": torch.ones(())}), all_tensors([torch.ones(1), "text"])
        (True, False)
    """
    try:
        recursively_apply(lambda tensor: tensor, data, error_on_other_type=True)
    except TypeError:
        return False
    return True


def has_object_per_sample(data: object) -> bool:
    """Return whether data is a list of one object per sample, rather than of fields that span all samples.

    Named tuples, tuples of containers, and lists that mix tensors and other objects are fields.

    Example:
        >>> has_object_per_sample([[3, 4], [5]]), has_object_per_sample(("a", "b"))
        (True, True)
        >>> has_object_per_sample((["a", "b"], [1, 2])), has_object_per_sample([torch.ones(2), ["a", "b"]])
        (False, False)
    """
    if isinstance(data, list):
        items: list[Any] = data
        return len({isinstance(item, torch.Tensor) for item in items}) < 2
    if type(data) is not tuple:
        return False
    fields: tuple[Any, ...] = data
    return not any(isinstance(field, torch.Tensor | list | tuple | Mapping) for field in fields)


def trim_objects(data: Any, *, real: int) -> Any:
    """Cut a list of one object per sample to the real samples.

    Example:
        >>> trim_objects(["a", "b", "a"], real=2)
        ['a', 'b']
    """
    if isinstance(data, torch.Tensor):
        return trim_tensors(data, real=real)
    if not has_object_per_sample(data):
        raise ValueError(
            f"gather_for_metrics got a {type(data).__qualname__} for a batch that ends in padding, and "
            "cannot remove the padding. Pass a list with one object per sample."
        )
    objects: Sequence[Any] = data
    return objects[:real]


def trim_tensors(data: Any, *, real: int) -> Any:
    """Cut nested tensors to the rows of real samples.

    Example:
        >>> trim_tensors({"ids": torch.tensor([7, 8, 7])}, real=2)
        {'ids': tensor([7, 8])}
    """
    return recursively_apply(lambda tensor: tensor if tensor.dim() == 0 else tensor[:real], data)


class TrackingFacet(Facet):
    """Log hyperparameters and values. Call methods on any process; only the main process logs."""

    __slots__ = ()

    @property
    def log_with(self) -> list[str | GeneralTracker]:
        """The trackers of `Accelerator(log_with=…)`; `init_trackers` also starts trackers assigned here."""
        return self._parts.trackers.log_with

    @log_with.setter
    def log_with(self, log_with: Trackers | None) -> None:
        self._parts.trackers.logging_dir = self._parts.project.logging_dir
        self._parts.trackers.choose(log_with)

    @property
    def trackers(self) -> list[GeneralTracker]:
        """The trackers, after `init_trackers`; on other ranks, placeholders that do nothing."""
        return self._parts.trackers.trackers

    @trackers.setter
    def trackers(self, trackers: list[GeneralTracker]) -> None:
        self._parts.trackers.use(trackers)

    def init_trackers(
        self,
        project_name: str,
        config: Any = None,
        init_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Start every tracker of `log_with`, and store hyperparameters.

        It may be called on the main process alone, unless a custom tracker logs on every process.
        After `load_state`, the runs that the checkpoint names are resumed. Runs of an earlier `init_trackers`
        are finished first.

        Args:
            project_name: Name of the project, or of the run if a tracker has no projects.
            config: Hyperparameters: a dictionary, a dataclass or an argparse namespace. It is not changed.
            init_kwargs: More arguments for a tracker's construction, by its name, such as
                `{"wandb": {"name": "baseline"}}`.

        Raises:
            SettingsError: `config` has another type.
            Exception: The error of a tracker, with `on_tracker_error="raise"`.

        Example:
            >>> import tempfile
            >>> from accel_train import Accelerator
            >>> accelerator = Accelerator(cpu=True)
            >>> accelerator.init_trackers("digits", config={"lr": 0.1})
            >>> accelerator.log({"loss": 0.5}, step=1)
            >>> accelerator.end_training()
        """
        trackers, checkpoints = self._parts.trackers, self._parts.checkpoints
        trackers.logging_dir = self._parts.project.logging_dir  # read now: scripts may have changed it
        trackers.start(project_name, config, init_kwargs)

        # `save_state` flushes logged values, and writes the ids of the runs.
        def save(models: Any, weights: Any, folder: str | os.PathLike[str]) -> None:
            del models, weights
            trackers.write()
            run_ids = trackers.run_ids()
            if run_ids and checkpoints.rank == 0:
                (Path(folder) / layout.TRACKERS_NAME).write_text(json.dumps(run_ids))

        checkpoints.save_hooks[-1] = save  # a key that no user's hook has: those are not negative

    def log(
        self,
        values: Mapping[str, Any],
        step: int | None = None,
        log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Log values with every tracker; do nothing without trackers.

        It does not wait for a device: tensors there are copied on the side and written by a later call, in
        order, by `save_state`, by `end_training`, or at the end of the program, also by an exception. Every
        ten seconds a call lets the trackers flush. With `log_system_metrics=True`, the metrics measured
        since the last call are added.

        Args:
            values: By name: numbers, strings, tensors, dictionaries of these, and library-specific objects.
                Tensors with several elements become histograms if the library supports them. Unsupported
                values are skipped, with one warning for each name.
            step: The step.
            log_kwargs: More arguments of a tracker's `log`, by its name.

        Raises:
            TrackerError: It was called before `init_trackers`, after `end_training`, or in a process forked
                from the one that called `init_trackers`.
            UnsupportedError: `values` is not a dictionary.
            Exception: The error of a tracker, with `on_tracker_error="raise"`.
        """
        parts = self._parts
        if parts.meter is not None and isinstance(values, Mapping):
            values = {**parts.meter.read(), **values}
        parts.trackers.log(values, step, log_kwargs)

    @overload
    def get_tracker(self, name: str, unwrap: Literal[False] = ...) -> GeneralTracker: ...
    @overload
    def get_tracker(self, name: str, unwrap: bool) -> Any: ...
    def get_tracker(self, name: str, unwrap: bool = False) -> GeneralTracker | Any:
        """Find a tracker, to call its own methods such as `log_images`.

        Args:
            name: Its name.
            unwrap: Whether to return the library's own object, such as the run of wandb.

        Returns:
            The tracker. On other ranks, and without trackers, a placeholder that does nothing.

        Raises:
            SettingsError: There are trackers, but none with that name.
        """
        return self._parts.trackers.get(name, unwrap=unwrap)

    def end_training(self) -> None:
        """Wait for a save in the background, finish the trackers, and destroy the process group.

        Call it last in a program. Without trackers and with one process it does nothing else. While an
        exception propagates, as in `finally`, it does not wait for ranks that do not respond, except a minute
        for one whose part of a save is missing.

        Raises:
            CheckpointWriteError: The state that is saved in the background could not be written.
            Exception: The error of a tracker, with `on_tracker_error="raise"`.
        """
        if self._parts.preemption is not None:
            self._parts.preemption.uninstall()
        try:
            self._parts.checkpoints.finish()
        finally:
            try:
                self._parts.trackers.finish()
            finally:
                self._parts.process.destroy_process_group()


def resume_runs(trackers: TrackerSession, folder: AnyPath) -> None:
    """Resume the runs whose ids are in a checkpoint, on the main process."""
    file = folder / layout.TRACKERS_NAME
    if not (trackers.log_with and runtime.current_topology().is_main and file.exists()):
        return
    try:
        read: Any = json.loads(file.read_text())
    except ValueError as error:
        raise CheckpointError(
            f"{file} is damaged: {error}. Load another checkpoint, or remove this file."
        ) from error
    if not isinstance(read, dict) or not all(isinstance(value, str) for value in read.values()):
        raise CheckpointError(
            f"{file} contains no run ids by tracker. Load another checkpoint, or remove this file."
        )
    trackers.resume(read)
