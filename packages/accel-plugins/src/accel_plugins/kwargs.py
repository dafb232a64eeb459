"""Base of kwargs handlers, the checks of their fields, and the handlers that belong to no engine."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch.profiler import ProfilerActivity

from accel_state import environ
from accel_state.errors import SettingsError, did_you_mean
from accel_state.files import any_path
from accel_state.labels import DynamoBackend
from accel_state.settings.model import parse_environ


class KwargsHandler:
    """Base of the dataclasses of keyword arguments for objects that `Accelerator` builds.

    Example:
        >>> from dataclasses import dataclass
        >>> @dataclass
        ... class Lamp(KwargsHandler):
        ...     color: str = "white"
        ...     watts: int = 40
        >>> Lamp(watts=60).to_kwargs()
        {'watts': 60}
    """

    def to_dict(self) -> dict[str, Any]:
        """Return all fields; dictionaries and lists are copied, other values are shared."""
        values = {name: value for name, value in vars(self).items() if not name.startswith("_")}
        return {
            name: copy.copy(value) if isinstance(value, dict | list) else value
            for name, value in values.items()
        }

    def to_kwargs(self) -> dict[str, Any]:
        """Return the fields whose value differs from the default."""
        default = type(self)().to_dict()
        return {name: value for name, value in self.to_dict().items() if default[name] != value}


def expect(owner: object, name: str, wanted: str, holds: bool) -> None:
    """Refuse the value of a field unless a condition on it holds."""
    if not holds:
        value = getattr(owner, name)
        raise SettingsError(f"{type(owner).__name__}({name}={value!r}): expected {wanted}.")


def expect_counts(owner: object, *names: str, least: int = 1, optional: bool = False) -> None:
    """Check that fields are integers of at least `least`, or `None` if that is `optional`."""
    for name in names:
        value = getattr(owner, name)
        wanted = f"a whole number of at least {least}{', or None' if optional else ''}"
        expect(owner, name, wanted, (optional and value is None) or is_count(value, least=least))


def expect_flags(owner: Any, *optional: str) -> None:
    """Check that all fields declared as bools are; a string such as `"false"` would count as true.

    Raises:
        SettingsError: A field is neither `True`, `False`, 1 nor 0, nor `None` if it is one of the `optional`.
    """
    for name in (option.name for option in fields(owner) if option.type in {"bool", "bool | None"}):
        value, may_be_none = getattr(owner, name), name in optional
        is_flag = isinstance(value, int) and value in {True, False}
        wanted = "True, False or None" if may_be_none else "True or False"
        expect(owner, name, wanted, is_flag or (value is None and may_be_none))


def is_count(value: object, *, least: int) -> bool:
    """Return whether a value is an integer of at least `least` (bools excluded)."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def resolve_fields(
    plugin: Any,
    section: str,
    defaults: Mapping[str, Any] | None = None,
    setting_names: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Replace the fields of a plugin that are `None` by their environment variables, else by their defaults.

    Variables of a section of `Settings` are read whether or not its switch is on, since creating a plugin
    requests it. `setting_names` maps fields to settings where they differ.

    Returns:
        The source of each field's value as messages name it: the argument or the variable, with the value.
    """
    settings = parse_environ(environ.read())
    sources: dict[str, str] = {}
    for name in (option.name for option in fields(plugin)):
        value = getattr(plugin, name)
        sources[name] = f"{type(plugin).__name__}({name}={value!r})"
        if value is not None:
            continue
        setting = settings.get(f"{section}.{(setting_names or {}).get(name, name)}")
        if setting is not None:
            sources[name] = f"{setting.origin}={setting.value!r}"
        setattr(plugin, name, setting.value if setting else (defaults or {}).get(name))
    return sources


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
        expect_counts(self, "num_steps", optional=True)
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
        resume_mid_epoch: Whether every loader continues with the next batch after `load_state`. Otherwise
            only stateful loaders do; others restart the interrupted epoch in the same order, and the script
            skips the batches already trained on, with `skip_first_batches`.
        already_sharded: Whether loaders read different data on each rank before they are prepared. If `None`,
            this is detected where possible: from a sampler or stream that has the number of ranks and the
            rank among its attributes, such as a `DistributedSampler`, from streams that `datasets` has split
            by node, and from datasets that read a split of Ray Data.
        shard_iterable_dataset: Whether iterable datasets are sharded, unless they are recognised as sharded
            already. `False` is `already_sharded=True` only for loaders of iterable datasets.

    Raises:
        SettingsError: A field has another type, or the last two contradict each other.
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
    shard_iterable_dataset: bool = field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        expect_flags(self, "dispatch_batches", "already_sharded")
        agree = self.shard_iterable_dataset or self.already_sharded is not False
        expect(self, "already_sharded", "None or True with shard_iterable_dataset=False", agree)
        expect(self, "data_seed", "an integer or None", isinstance(self.data_seed, int | None))


@dataclass
class ProjectConfiguration:
    """Directories of checkpoints and logs, and the names and number of checkpoints.

    Args:
        project_dir: Directory of the project's files.
        logging_dir: Directory of the trackers' files; `project_dir` if `None`.
        automatic_checkpoint_naming: Whether checkpoints are called
            `<project_dir>/checkpoints/checkpoint_<iteration>`.
        total_limit: Number of checkpoints to keep; all if `None`.
        iteration: Number of the next checkpoint.
        save_on_each_node: Whether each node's local main process writes the files of the main process, for
            nodes without a shared file system.
        durable: Whether `save_state` waits until a checkpoint is on disk, so that it survives even a crash of
            the machine. Otherwise it counts once the operating system has it, as in other libraries.
        save_on_preemption: Whether SIGTERM or SIGUSR1, with which schedulers announce that they will end a
            job, saves a checkpoint on all ranks after the same step, and exits with code 143
            (`Accelerator.exit_if_preempted` defines a step). Needs `automatic_checkpoint_naming`.

    Raises:
        SettingsError: A field has another type or is out of its range, or `project_dir` has an unknown
            scheme; or `save_on_preemption` is set without `automatic_checkpoint_naming`.

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
    durable: bool = True
    save_on_preemption: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        for name in ("project_dir", "logging_dir"):
            expect(self, name, "a path or None", isinstance(getattr(self, name), str | os.PathLike | None))
        expect_flags(self)
        expect_counts(self, "total_limit", optional=True)
        expect_counts(self, "iteration", least=0)
        is_numbered = self.automatic_checkpoint_naming or not self.save_on_preemption
        expect(self, "save_on_preemption", "automatic_checkpoint_naming=True with it", is_numbered)
        self.set_directories(self.project_dir)

    def set_directories(self, project_dir: str | Path | None = None) -> None:
        """Set `project_dir`, and `logging_dir` with it unless that is set.

        Args:
            project_dir: Directory of the project's files.

        Raises:
            SettingsError: `project_dir` is a URL with a scheme that fsspec does not know.
        """
        self.project_dir = project_dir
        if project_dir is None:
            return
        location = any_path(project_dir, "project_dir")
        if self.logging_dir is None and isinstance(location, Path):
            self.logging_dir = location if "://" in str(project_dir) else project_dir


@dataclass
class InitProcessGroupKwargs(KwargsHandler):
    """Options of `torch.distributed.init_process_group`.

    Args:
        backend: Name of the backend; the default `"nccl"` means the backend of the run's device.
        init_method: URL of the rendezvous; the launcher's variables if `None`.
        timeout: Timeout of collectives, also in the groups of a mesh. When it expires, every rank raises an
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
        for name in ("backend", "init_method"):
            expect(self, name, "a text or None", isinstance(getattr(self, name), str | None))
        self._has_timeout = self.timeout is not None
        if self.timeout is None:
            # PyTorch's defaults (torch.distributed.constants); nccl's is unset there in builds without nccl.
            self.timeout = timedelta(minutes=10 if self.backend == "nccl" else 30)
        wanted = "a positive time, such as datetime.timedelta(seconds=600)"
        timeout: Any = self.timeout
        expect(self, "timeout", wanted, isinstance(timeout, timedelta) and timeout > timedelta(0))

    def to_kwargs(self) -> dict[str, Any]:
        """Return the fields that were set, also a timeout that equals another backend's default."""
        timeout = {"timeout": self.timeout} if self._has_timeout else {}
        return super().to_kwargs() | timeout


@dataclass
class AutocastKwargs(KwargsHandler):
    """Options of `torch.autocast`, for a run or for one `accelerator.autocast` block.

    Args:
        enabled: Whether operations run in the lower precision.
        cache_enabled: Whether casts of weights are kept until the context ends; torch's choice if `None`.

    Raises:
        SettingsError: A field is not a bool.

    Example:
        >>> AutocastKwargs(cache_enabled=False).to_kwargs()
        {'cache_enabled': False}
    """

    enabled: bool = True
    cache_enabled: bool | None = None

    def __post_init__(self) -> None:
        expect_flags(self, "cache_enabled")


@dataclass
class GradScalerKwargs(KwargsHandler):
    """Options of the loss scaler that fp16 needs; see `torch.amp.GradScaler`.

    Args:
        init_scale: The first scale.
        growth_factor: Multiplies the scale after `growth_interval` good steps; above 1.
        backoff_factor: Multiplies the scale after a step with infinite gradients; between 0 and 1.
        growth_interval: Number of good steps in a row before the scale grows.
        enabled: Whether losses are scaled.

    Raises:
        SettingsError: A field is out of its range.
    """

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    enabled: bool = True

    def __post_init__(self) -> None:
        expect(self, "init_scale", "a number above 0", self.init_scale > 0)
        expect(self, "growth_factor", "a number above 1", self.growth_factor > 1)
        expect(self, "backoff_factor", "a number between 0 and 1", 0 < self.backoff_factor < 1)
        expect_counts(self, "growth_interval")
        expect_flags(self)


_COMPILE_DEFAULTS = {
    "backend": DynamoBackend.NO.value.lower(),
    "mode": "default",
    "fullgraph": False,
    "dynamic": None,
    "options": None,
    "disable": False,
}

# PyTorch 2.1 renamed the backends of torch_xla; scripts and config files use the old names.
_XLA_BACKENDS = {"torchxla_trace_once": "openxla_eval", "aot_torchxla_trace_once": "openxla"}


@dataclass
class TorchDynamoPlugin(KwargsHandler):
    """Options of `torch.compile`. Arguments take precedence over `ACCELERATE_DYNAMO_*`, these over defaults.

    Args:
        backend: The compiler, a `DynamoBackend` or its name; `NO` does not compile.
        mode: `"default"`, `"reduce-overhead"`, `"max-autotune"` or another mode of `torch.compile`.
        fullgraph: Whether a model must compile into a single graph.
        dynamic: Whether shapes are dynamic; torch decides if `None`.
        options: Options of the backend; not together with `mode`.
        disable: Whether `torch.compile` does nothing, for tests.
        use_regional_compilation: Whether a model's repeated blocks are compiled instead of the full model.

    Raises:
        SettingsError: The value of a field, or of its variable, is invalid.

    Example:
        >>> TorchDynamoPlugin(backend="inductor", mode="max-autotune").to_kwargs()
        {'backend': 'inductor', 'mode': 'max-autotune'}
    """

    backend: DynamoBackend | str | None = None
    mode: str | None = None
    fullgraph: bool | None = None
    dynamic: bool | None = None
    options: Any = None
    disable: bool = False
    use_regional_compilation: bool | None = None

    def __post_init__(self) -> None:
        names = {"fullgraph": "use_fullgraph", "dynamic": "use_dynamic"}
        resolve_fields(self, "dynamo", {**_COMPILE_DEFAULTS, "use_regional_compilation": False}, names)
        name = str(getattr(self.backend, "value", self.backend)).upper()
        name = next((old.upper() for old, new in _XLA_BACKENDS.items() if new.upper() == name), name)
        if name not in DynamoBackend:
            backends = [backend.lower() for backend in DynamoBackend.list()]
            hint = did_you_mean(name.lower(), backends, f"there are {backends}.")
            raise SettingsError(f"TorchDynamoPlugin(backend={self.backend!r}): no such compiler; {hint}")
        self.backend = DynamoBackend(name)
        expect(self, "mode", "a text", isinstance(self.mode, str))
        expect_flags(self, "dynamic")

    def to_dict(self) -> dict[str, Any]:
        """Return all fields, with the backend as `torch.compile` spells it."""
        name = cast("DynamoBackend", self.backend).value.lower()
        return super().to_dict() | {"backend": _XLA_BACKENDS.get(name, name)}

    def to_kwargs(self) -> dict[str, Any]:
        """Return the arguments of `torch.compile` that differ from its defaults, whatever their source."""
        values = self.to_dict()
        return {name: values[name] for name, default in _COMPILE_DEFAULTS.items() if values[name] != default}


ActivityName = Literal["cpu", "xpu", "mtia", "cuda", "hpu"]
"""What the profiler records."""


@dataclass
class TilingKwargs(KwargsHandler):
    """Tiling that bounds the memory of long sequences; works with any parallelism, and without.

    Args:
        loss_chunk_size: Rows of logits in memory at a time: in training, the loss of a causal language model
            of transformers is computed in chunks, and its output has no logits. The default is
            `ACCELERATE_LOSS_CHUNK_SIZE` of the environment, else all at once.
        mlp_tile_size: Tokens for which the MLP of a block is computed at a time; the backward pass recomputes
            each tile. The default is `ACCELERATE_MLP_TILE_SIZE` of the environment, else all at once.

    Raises:
        SettingsError: A size is not an integer of at least 1.

    Example:
        >>> TilingKwargs(loss_chunk_size=1024).loss_chunk_size
        1024
    """

    loss_chunk_size: int | None = None
    mlp_tile_size: int | None = None

    def __post_init__(self) -> None:
        resolve_fields(self, "training")
        expect_counts(self, "loss_chunk_size", "mlp_tile_size", optional=True)


@dataclass
class StepGuard(KwargsHandler):
    """Skip optimizer steps whose gradients are not finite or too large, alike on all ranks.

    A skipped step changes neither weights nor the optimizer's state, and schedules do not advance. Each
    optimizer is judged by the norm of its own gradients over all ranks: as they are in `step`, or before
    `clip_grad_norm_` and `clip_grad_value_` where these follow the last backward pass.

    Fused optimizers of torch skip in their kernels, and the host does not wait for the device: it reads
    whether a step was skipped at the next step. For other optimizers, and for the first step of a fused SGD
    with momentum, it waits in `step`. So it does wherever `step_was_skipped` is read.

    Args:
        max_norm: The largest norm with which an optimizer steps; any finite one if `None`.
        give_up_after: Number of skipped steps in a row after which the next call of `step` raises a
            `FloatingPointError`, on all ranks. The count begins again when a run resumes.

    Raises:
        SettingsError: `max_norm` is not above 0, or `give_up_after` is no integer of 1 or more.

    Example:
        >>> StepGuard(max_norm=50.0)
        StepGuard(max_norm=50.0, give_up_after=10)
    """

    max_norm: float | None = None
    give_up_after: int = 10

    def __post_init__(self) -> None:
        norm: Any = self.max_norm
        is_norm = norm is None or (isinstance(norm, float | int) and 0 < norm < math.inf)
        expect(self, "max_norm", "a finite number above 0, or None", is_norm)
        expect_counts(self, "give_up_after")


@dataclass
class ReplicaSyncKwargs(KwargsHandler):
    """Periodic synchronisation of replica groups that train independently: torchft's LocalSGD or DiLoCo.

    Args:
        sync_every: Number of optimizer steps of a group between two syncs.
        outer_optimizer: Builds, from parameters, the outer optimizer, which steps by the average change of a
            window: DiLoCo, as with `lambda parameters: torch.optim.SGD(parameters, lr=0.7, momentum=0.9,
            nesterov=True)`. If `None`, parameters are averaged: LocalSGD.

    Raises:
        SettingsError: `sync_every` is no integer of 1 or more, or `outer_optimizer` cannot be called.

    Example:
        >>> ReplicaSyncKwargs(sync_every=50).sync_every
        50
    """

    sync_every: int = 32
    outer_optimizer: Callable[[Any], Any] | None = None

    def __post_init__(self) -> None:
        expect_counts(self, "sync_every")
        is_function = self.outer_optimizer is None or callable(self.outer_optimizer)
        expect(self, "outer_optimizer", "a function of parameters, or None", is_function)


@dataclass
class ProfileKwargs(KwargsHandler):
    """Options of `torch.profiler.profile`.

    Args:
        activities: Activities to record, of `"cpu"`, `"cuda"`, `"xpu"`, `"mtia"`, `"hpu"`; all that this
            build of torch supports if `None`.
        schedule_option: Arguments of `torch.profiler.schedule` (`wait`, `warmup`, `active`, `repeat`,
            `skip_first`, …); records every step if `None`.
        on_trace_ready: Called with the profiler whenever a trace is complete.
        record_shapes: Whether shapes of inputs are recorded.
        profile_memory: Whether allocations are recorded.
        with_stack: Whether source lines are recorded.
        with_flops: Whether floating point operations are estimated.
        with_modules: Whether the hierarchy of modules is recorded.
        output_trace_dir: Directory into which `Accelerator.profile` writes a Chrome trace of each process.

    Raises:
        SettingsError: A field has another type.

    Example:
        >>> with ProfileKwargs(activities=["cpu"]).build() as profiler:
        ...     _ = torch.ones(2) + 1
        >>> any("add" in event.key for event in profiler.key_averages())
        True
    """

    activities: list[ActivityName] | None = None
    schedule_option: dict[str, int] | None = None
    on_trace_ready: Callable[..., Any] | None = None
    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False
    with_flops: bool = False
    with_modules: bool = False
    output_trace_dir: str | None = None

    def __post_init__(self) -> None:
        expect_flags(self)
        expect(self, "activities", "a list of names, or None", not isinstance(self.activities, str))

    def _get_profiler_activity(self, activity: ActivityName) -> ProfilerActivity:
        """Return torch's member for the name of an activity.

        Raises:
            SettingsError: This build of torch does not record it.
        """
        recorded = {member.name.lower(): member for member in torch.profiler.supported_activities()}
        if activity not in recorded:
            raise SettingsError(
                f"ProfileKwargs(activities=[{activity!r}]): this build of torch records {sorted(recorded)}."
            )
        return recorded[activity]

    def build(self) -> torch.profiler.profile:
        """Build the profiler.

        Raises:
            SettingsError: An activity is not supported.
            TypeError: `schedule_option` lacks or misspells an argument.
        """
        names, options = self.activities, self.schedule_option
        flags = ("record_shapes", "profile_memory", "with_stack", "with_flops", "with_modules")
        return torch.profiler.profile(
            activities=None if names is None else [*map(self._get_profiler_activity, names)],
            schedule=None if options is None else torch.profiler.schedule(**options),
            on_trace_ready=self.on_trace_ready,
            **{name: getattr(self, name) for name in flags},
        )
