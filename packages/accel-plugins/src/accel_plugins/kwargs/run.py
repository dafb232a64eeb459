"""Options of a run: gradient accumulation, data loaders, directories of its files, the process group."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from accel_plugins.kwargs.base import KwargsHandler, expect, expect_flags, is_count
from accel_state.local_path import local_path

if TYPE_CHECKING:
    from pathlib import Path


@dataclass
class GradientAccumulationPlugin(KwargsHandler):
    """Options of gradient accumulation over several micro-batches per optimizer step.

    Args:
        num_steps: Number of micro-batches per optimizer step.
        adjust_scheduler: Has no effect, as in Accelerate: prepared schedulers advance when their optimizers
            step, never in between.
        sync_with_dataloader: Whether the last batch of a loader always ends a step.
        sync_each_batch: Whether gradients are all-reduced after every micro-batch, which costs communication
            and saves memory under strategies that shard gradients.

    Raises:
        SettingsError: A field is out of its range.
    """

    num_steps: int | None = None
    adjust_scheduler: bool = True
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False

    def __post_init__(self) -> None:
        wanted = "a whole number above 0, or None"
        expect(self, "num_steps", wanted, lambda value: value is None or is_count(value, least=1))
        expect_flags(self)


@dataclass
class DataLoaderConfiguration:
    """Options of prepared data loaders.

    Args:
        split_batches: Whether a loader's batch is split across ranks; otherwise every rank gets full
            batches, and the global batch grows with the world size.
        dispatch_batches: Whether the main process reads all batches and scatters them. If `None`, it does so
            for iterable datasets.
        even_batches: Whether the last batches are filled with samples from the beginning, so that every
            process gets the same number of samples.
        use_seedable_sampler: Whether the shuffle depends only on the seed and the epoch, and so is the same
            for any world size.
        data_seed: The seed of the seedable sampler; torch's if `None`.
        non_blocking: Whether host-to-device copies of batches are asynchronous; needs pinned memory.
        use_stateful_dataloader: Whether loaders become torchdata's `StatefulDataLoader`.
        resume_mid_epoch: Whether `load_state` lets every loader go on with the batch after the last one.
            Otherwise only stateful ones do; others begin the interrupted epoch again, in the same order, and
            the script leaves out what it has done, with `skip_first_batches`.
        already_sharded: Whether loaders give each rank its own data before they are prepared. If `None`, that
            is recognised where it can be: by a sampler or stream that has the number of ranks and the rank
            among its attributes, such as a `DistributedSampler`, by streams that `datasets` has split by
            node, and by Ray Data's.

    Raises:
        SettingsError: A field has another type.
    """

    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True
    use_seedable_sampler: bool = False
    data_seed: int | None = None
    non_blocking: bool = False
    use_stateful_dataloader: bool = False
    resume_mid_epoch: bool = field(default=False, kw_only=True)
    already_sharded: bool | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        expect_flags(self, "dispatch_batches", "already_sharded")
        expect(self, "data_seed", "an integer or None", lambda value: value is None or isinstance(value, int))


@dataclass
class ProjectConfiguration:
    """Directories of checkpoints and logs, and the names and number of checkpoints.

    Args:
        project_dir: Directory of the project's files.
        logging_dir: Directory of the trackers' files; `project_dir` if `None`.
        automatic_checkpoint_naming: Whether checkpoints are called
            `<project_dir>/checkpoints/checkpoint_<iteration>`.
        total_limit: Number of those to keep; all if `None`.
        iteration: Number of the next checkpoint.
        save_on_each_node: Whether each node's local main process writes the files of the main process, for
            nodes without a shared file system.

    Raises:
        SettingsError: A field has another type or is out of its range, or `project_dir` has a scheme.

    Example:
        >>> ProjectConfiguration(project_dir="runs/7").logging_dir
        'runs/7'
    """

    project_dir: str | Path | None = None
    logging_dir: str | Path | None = None
    automatic_checkpoint_naming: bool = False
    total_limit: int | None = None
    iteration: int = 0
    save_on_each_node: bool = False

    def __post_init__(self) -> None:
        for name in ("project_dir", "logging_dir"):
            expect(self, name, "a path or None", lambda value: isinstance(value, str | os.PathLike | None))
        expect_flags(self)
        wanted = "a whole number above 0, or None"
        expect(self, "total_limit", wanted, lambda value: value is None or is_count(value, least=1))
        expect(self, "iteration", "a whole number of at least 0", lambda value: is_count(value, least=0))
        self.set_directories(self.project_dir)

    def set_directories(self, project_dir: str | Path | None = None) -> None:
        """Set `project_dir`, and `logging_dir` with it unless that is set.

        Args:
            project_dir: Directory of the project's files.

        Raises:
            SettingsError: It has a scheme, such as `"s3://bucket"`.
        """
        if project_dir is not None:
            local_path(project_dir, "project_dir")
        self.project_dir = project_dir
        if self.logging_dir is None:
            self.logging_dir = project_dir


# PyTorch's own (torch.distributed.constants), repeated since nccl's is unset in builds without nccl.
_TIMEOUTS = {"nccl": timedelta(minutes=10)}
_TIMEOUT = timedelta(minutes=30)


@dataclass
class InitProcessGroupKwargs(KwargsHandler):
    """Options of `torch.distributed.init_process_group`.

    Args:
        backend: Name of the backend; the default `"nccl"` means the backend of the run's device.
        init_method: URL of the rendezvous; the launcher's variables if `None`.
        timeout: How long a collective may take, also in the groups of a mesh. Then every rank raises an
            error; NCCL ends the process instead. If `None`, 10 minutes for nccl, 30 minutes for others.

    Raises:
        SettingsError: A field has another type, or the timeout is not positive.

    Example:
        >>> InitProcessGroupKwargs(timeout=timedelta(seconds=90)).to_kwargs()
        {'timeout': datetime.timedelta(seconds=90)}
    """

    backend: str | None = "nccl"
    init_method: str | None = None
    timeout: timedelta | None = None

    def __post_init__(self) -> None:
        text = "a text or None"
        expect(self, "backend", text, lambda value: value is None or isinstance(value, str))
        expect(self, "init_method", text, lambda value: value is None or isinstance(value, str))
        self._has_timeout = self.timeout is not None
        if self.timeout is None:
            self.timeout = _TIMEOUTS.get(self.backend or "", _TIMEOUT)
        expect(
            self,
            "timeout",
            "a positive time, such as datetime.timedelta(seconds=600)",
            lambda value: isinstance(value, timedelta) and value > timedelta(0),
        )

    def to_kwargs(self) -> dict[str, Any]:
        """Return the fields that were set, also a timeout that equals another backend's default."""
        timeout = {"timeout": self.timeout} if self._has_timeout else {}
        return super().to_kwargs() | timeout
