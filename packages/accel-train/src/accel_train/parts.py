"""The composition root: what an `Accelerator` is made of, and the one function that makes it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from accel_plugins.choose import choose
from accel_plugins.kwargs.accumulation import GradientAccumulationPlugin
from accel_plugins.kwargs.amp import AutocastKwargs, GradScalerKwargs
from accel_plugins.kwargs.dataloader import DataLoaderConfiguration
from accel_plugins.kwargs.ddp import DistributedDataParallelKwargs
from accel_plugins.kwargs.dynamo import TorchDynamoPlugin
from accel_plugins.kwargs.process_group import InitProcessGroupKwargs
from accel_plugins.kwargs.profile import ProfileKwargs
from accel_plugins.kwargs.project import ProjectConfiguration
from accel_plugins.plugin_specs import as_handlers, described, find_plugins
from accel_plugins.precision import build_precision
from accel_plugins.registry import available, load
from accel_state import environ
from accel_state.accelerator_state import AcceleratorState
from accel_state.errors import SettingsError
from accel_state.gradient_state import GradientState
from accel_state.labels import DynamoBackend, RNGType
from accel_state.logging import get_logger
from accel_state.partial_state import PartialState
from accel_state.settings.environ import from_environ
from accel_trackers.session import TrackerSession
from accel_train.checkpoint.run import Run
from accel_train.plugin_args import (
    configured_accumulation,
    known_plugins,
    refuse_unavailable_engines,
    unchanged_by_failure,
)
from accel_train.scheduler import check_clock
from accel_train.sync import Synchronizer
from accel_train.token_normalizer import ItemWindow
from accel_train.triggers import Trigger

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    import torch
    from torch import nn

    from accel_plugins.kwargs.base import KwargsHandler
    from accel_plugins.roles import PrecisionPolicy
    from accel_plugins.strategy import Strategy
    from accel_state.labels import PrecisionType
    from accel_state.runtime import Runtime
    from accel_state.settings import Settings
    from accel_trackers.session import OnTrackerError
    from accel_train.optimizer import AcceleratedOptimizer
    from accel_train.scheduler import AcceleratedScheduler, StepPer

logger = get_logger(__name__)

HANDLERS: tuple[type[Any], ...] = (
    AutocastKwargs,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProfileKwargs,
)
"""What `Accelerator(kwargs_handlers=[…])` takes, one of each."""


class _Unset:
    """What `split_batches` is when nobody gave it."""

    def __repr__(self) -> str:
        return "<unset>"


UNSET: Any = _Unset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """The arguments of `Accelerator`, as they were given; documented there."""

    device_placement: bool = True
    split_batches: bool = UNSET
    mixed_precision: PrecisionType | str | None = None
    gradient_accumulation_steps: int = 1
    cpu: bool = False
    dataloader_config: DataLoaderConfiguration | None = None
    rng_types: Sequence[str | RNGType] | None = None
    log_with: Any = None
    on_tracker_error: OnTrackerError = "raise"
    project_dir: str | Path | None = None
    project_config: ProjectConfiguration | None = None
    gradient_accumulation_plugin: GradientAccumulationPlugin | None = None
    step_scheduler_with_optimizer: bool = True
    step_scheduler_per: StepPer | None = None
    kwargs_handlers: Sequence[KwargsHandler] | None = None
    dynamo_backend: DynamoBackend | str | None = None
    dynamo_plugin: TorchDynamoPlugin | None = None
    plugins: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(slots=True)
class Prepared:
    """What one `Accelerator` has prepared, in that order."""

    models: list[nn.Module] = field(default_factory=list["nn.Module"])
    optimizers: list[AcceleratedOptimizer] = field(default_factory=list["AcceleratedOptimizer"])
    schedulers: list[AcceleratedScheduler] = field(default_factory=list["AcceleratedScheduler"])
    dataloaders: list[Any] = field(default_factory=list[Any])

    def __contains__(self, something: object) -> bool:
        kinds = (self.models, self.optimizers, self.schedulers, self.dataloaders)
        return any(something is one for kind in kinds for one in kind)

    def parameters(self) -> Iterator[torch.Tensor]:
        """The parameters of optimizers and models; some come more than once."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                yield from group["params"]
        for model in self.models:
            yield from model.parameters()

    def clear(self) -> None:
        """Forget everything."""
        for kind in (self.models, self.optimizers, self.schedulers, self.dataloaders):
            kind.clear()


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Everything that the facets of an `Accelerator` work with; only `prepared` and the states change.

    Args:
        process: The documented face of this process.
        state: The same with precision and compiler.
        gradient_state: Whether gradients are synchronised, and which loader is active.
        strategy: How models are trained.
        precision: In which number formats.
        compiler: How models are compiled.
        synchronizer: Counts micro-batches.
        items: Counts items, where losses are sums.
        trigger: The flag that processes share.
        handlers: Every given kwargs handler, and every plugin, by its type.
        dataloading: How loaders are prepared.
        rng_types: Which sources of randomness loaders synchronise at their beginning.
        project: Directories.
        device_placement: Whether `prepare` moves things to the device unless told otherwise.
        step_scheduler_with_optimizer: Whether schedulers follow their optimizers.
        step_scheduler_per: By which clock they do.
        prepared: What `prepare` has prepared.
        checkpoints: What is saved and loaded, and where.
        trackers: The experiment trackers.
    """

    process: PartialState
    state: AcceleratorState
    gradient_state: GradientState
    strategy: Strategy
    precision: PrecisionPolicy
    compiler: TorchDynamoPlugin
    synchronizer: Synchronizer
    items: ItemWindow
    trigger: Trigger
    handlers: Mapping[type, KwargsHandler]
    dataloading: DataLoaderConfiguration
    rng_types: Sequence[str | RNGType]
    project: ProjectConfiguration
    device_placement: bool
    step_scheduler_with_optimizer: bool
    step_scheduler_per: StepPer | None
    prepared: Prepared
    checkpoints: Run
    trackers: TrackerSession


def build_parts(arguments: Arguments) -> Parts:
    """Read the settings, start the process group if there is none yet, and put an `Accelerator` together.

    Raises:
        SettingsError: An argument, or an environment variable that stands for it, cannot be used.
        UnsupportedError: What was asked for is not there on this device.
    """
    settings = _settings()
    handlers = sort_handlers(arguments.kwargs_handlers or ())
    dataloading = _dataloading(arguments)
    rng_types = _rng_types(arguments.rng_types)
    project, trackers = _project_and_trackers(arguments)
    compiler = _dynamo(arguments)
    plugins = find_plugins(arguments.plugins, known_plugins(), settings)
    settings = described(settings, plugins)
    accumulation = _accumulation(arguments, settings, plugins)
    with unchanged_by_failure():
        state = _state(arguments, handlers, compiler, plugins)
        process = PartialState()
        runtime = process.runtime
        handlers |= as_handlers(plugins)
        more = {GradientAccumulationPlugin: accumulation, DataLoaderConfiguration: dataloading}
        strategy, precision = _strategy(settings, state.mixed_precision, runtime, {**handlers, **more})
    state.device_mesh = strategy.mesh
    gradient_state = GradientState(gradient_accumulation_plugin=accumulation)
    prepared = Prepared()
    synchronizer = _synchronizer(gradient_state, strategy, runtime)
    return Parts(
        process=process,
        state=state,
        gradient_state=gradient_state,
        strategy=strategy,
        precision=precision,
        compiler=compiler,
        synchronizer=synchronizer,
        items=ItemWindow(runtime, prepared.parameters),
        trigger=Trigger(runtime),
        handlers=handlers,
        dataloading=dataloading,
        rng_types=rng_types,
        project=project,
        device_placement=arguments.device_placement,
        step_scheduler_with_optimizer=arguments.step_scheduler_with_optimizer,
        step_scheduler_per=_clock(arguments),
        prepared=prepared,
        checkpoints=Run(
            runtime=runtime,
            project=project,
            prepared=prepared,
            synchronizer=synchronizer,
            persister=strategy.persister,
            shards=strategy.shards,
            precision=precision,
        ),
        trackers=trackers,
    )


def _synchronizer(gradient_state: GradientState, strategy: Strategy, runtime: Runtime) -> Synchronizer:
    alone = runtime.topology.world_size == 1
    return Synchronizer(gradient_state, None if alone else strategy.stepper.no_sync)


def _project_and_trackers(arguments: Arguments) -> tuple[ProjectConfiguration, TrackerSession]:
    project = _project(arguments)
    where, on_error = project.logging_dir, arguments.on_tracker_error
    return project, TrackerSession(arguments.log_with, where, on_error=on_error)


def _settings() -> Settings:
    environment = environ.read()
    refuse_unavailable_engines(environment)
    return from_environ(environment)


def _strategy(
    settings: Settings, mixed_precision: str, runtime: Runtime, handlers: Mapping[type, Any]
) -> tuple[Strategy, PrecisionPolicy]:
    """Choose the strategy and make it, and the precision that goes with it."""
    specs = available()
    name = choose(settings, runtime.topology, runtime.device, specs)
    precision = build_precision(
        mixed_precision,
        runtime.device,
        handlers.get(AutocastKwargs),
        handlers.get(GradScalerKwargs),
        shared=specs[name].shards_gradients,
        master_weights=specs[name].master_weights,
    )
    strategy = load(name)(settings, runtime, precision, handlers)
    return strategy, strategy.precision or precision


def sort_handlers(given: Iterable[KwargsHandler]) -> dict[type, Any]:
    """Every kwargs handler by its type.

    Raises:
        SettingsError: One is no kwargs handler that `Accelerator` knows, or there are two of a type.

    Example:
        >>> sort_handlers([AutocastKwargs(enabled=False)])
        {<class 'accel_plugins.kwargs.amp.AutocastKwargs'>: AutocastKwargs(enabled=False, cache_enabled=None)}
    """
    found: dict[type, Any] = {}
    for handler in given:
        kind = next((known for known in HANDLERS if isinstance(handler, known)), None)
        if kind is None:
            names = ", ".join(known.__name__ for known in HANDLERS)
            raise SettingsError(f"kwargs_handlers contains {handler!r}; it takes one of each of {names}.")
        if kind in found:
            raise SettingsError(
                f"kwargs_handlers contains two {kind.__name__}: {found[kind]!r} and {handler!r}; give one."
            )
        found[kind] = handler
    return found


def _accumulation(
    arguments: Arguments, settings: Settings, plugins: Mapping[str, Any]
) -> GradientAccumulationPlugin:
    steps, plugin = arguments.gradient_accumulation_steps, arguments.gradient_accumulation_plugin
    if plugin is None:
        plugin = GradientAccumulationPlugin(num_steps=None if steps == 1 else steps)
    elif steps != 1:
        raise SettingsError(
            f"Accelerator(gradient_accumulation_steps={steps!r}, gradient_accumulation_plugin={plugin!r}): "
            "give one of the two."
        )
    if plugin.num_steps is None:
        return replace(plugin, num_steps=settings.training.gradient_accumulation_steps)
    configured = configured_accumulation(plugins.get("deepspeed_plugin"))
    if configured is not None and configured != plugin.num_steps:
        logger.warning_once(
            "Accelerator has gradient_accumulation_steps=%r, and the DeepSpeed configuration %r, which is "
            "used; say it in one place, or 'auto' in the configuration.",
            plugin.num_steps,
            configured,
        )
        return replace(plugin, num_steps=configured)
    return plugin


def _dataloading(arguments: Arguments) -> DataLoaderConfiguration:
    config, split = arguments.dataloader_config, arguments.split_batches
    if split is UNSET:
        return DataLoaderConfiguration() if config is None else config
    if config is None:
        return DataLoaderConfiguration(split_batches=split)
    if config.split_batches != split:
        raise SettingsError(
            f"Accelerator(split_batches={split!r}, dataloader_config={config!r}): the two contradict each "
            "other; say it in dataloader_config alone."
        )
    return config


def _rng_types(given: Sequence[str | RNGType] | None) -> list[str | RNGType]:
    types: list[str | RNGType] = ["generator"] if given is None else [*given]
    for one in types:
        if one not in RNGType:
            raise SettingsError(
                f"rng_types contains {one!r}; it takes {', '.join(map(repr, RNGType.list()))}."
            )
    return types


def _project(arguments: Arguments) -> ProjectConfiguration:
    config = arguments.project_config
    if config is None:
        return ProjectConfiguration(project_dir=arguments.project_dir)
    if arguments.project_dir is not None and config.project_dir is None:
        config.set_directories(arguments.project_dir)
    return config


def _dynamo(arguments: Arguments) -> TorchDynamoPlugin:
    backend, plugin = arguments.dynamo_backend, arguments.dynamo_plugin
    if plugin is None:
        return TorchDynamoPlugin(backend=backend)
    if backend is not None:
        raise SettingsError(
            f"Accelerator(dynamo_backend={backend!r}, dynamo_plugin={plugin!r}): give one of the two."
        )
    return plugin


def _clock(arguments: Arguments) -> StepPer | None:
    step_per = arguments.step_scheduler_per
    check_clock(step_per, "step_scheduler_per")
    if step_per is not None and not arguments.step_scheduler_with_optimizer:
        raise SettingsError(
            f"Accelerator(step_scheduler_per={step_per!r}, step_scheduler_with_optimizer=False): without the "
            "optimizer every call of step() is one step of the schedule; leave one of the two out."
        )
    return step_per


def _state(
    arguments: Arguments,
    handlers: Mapping[type, Any],
    compiler: TorchDynamoPlugin,
    plugins: Mapping[str, Any],
) -> AcceleratorState:
    return AcceleratorState(
        mixed_precision=arguments.mixed_precision,
        cpu=arguments.cpu,
        dynamo_plugin=compiler,
        _from_accelerator=True,
        **plugins,
        **_process_group(handlers),
    )


def _process_group(handlers: Mapping[type, Any]) -> dict[str, Any]:
    handler = handlers.get(InitProcessGroupKwargs)
    return {} if handler is None else handler.to_kwargs()
