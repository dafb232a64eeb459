"""Frozen config; one build(config)."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_plugins.ddp import DistributedDataParallelKwargs
from accel_plugins.fp8.recipe import RECIPES, Recipe, build_recipe
from accel_plugins.kwargs import (
    AutocastKwargs,
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
    ProfileKwargs,
    ProjectConfiguration,
    TorchDynamoPlugin,
)
from accel_plugins.optimizer import AcceleratedOptimizer, AcceleratedScheduler, StepPer, check_clock
from accel_plugins.precision import build_precision
from accel_plugins.registry import (
    ENGINES,
    STRATEGIES,
    as_handlers,
    choose,
    find_plugins,
    load,
    with_plugin_fields,
)
from accel_plugins.strategy import PrecisionPolicy, Strategy, StrategySpec
from accel_state import environ
from accel_state.accelerator_state import AcceleratorState, GradientState, is_initialized
from accel_state.errors import SettingsError
from accel_state.labels import DynamoBackend, PrecisionType, RNGType
from accel_state.logging import get_logger
from accel_state.partial_state import PartialState
from accel_state.runtime import Runtime
from accel_state.settings import Settings
from accel_state.settings.model import from_environ
from accel_trackers.session import OnTrackerError, TrackerSession
from accel_train.accelerator.prepare import RecipeApplier
from accel_train.checkpoint.contents import CheckpointContext
from accel_train.profiling import StepMeter
from accel_train.step import EngineCalls, ItemWindow, Synchronizer, Trigger, bind_backward, bind_step

if TYPE_CHECKING:
    import torch
    from torch import nn


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
    """The default of `split_batches`, which tells an absent argument from `False`."""

    def __repr__(self) -> str:
        return "<unset>"


UNSET: Any = _Unset()


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceleratorConfig:
    """The unchecked arguments of `Accelerator`, which documents them."""

    device_placement: bool = True
    split_batches: bool = UNSET
    mixed_precision: PrecisionType | str | None = None
    gradient_accumulation_steps: int = 1
    cpu: bool = False
    dataloader_config: DataLoaderConfiguration | None = None
    rng_types: Sequence[str | RNGType] | None = None
    log_with: Any = None
    on_tracker_error: OnTrackerError = "raise"
    log_system_metrics: bool = False
    project_dir: str | Path | None = None
    project_config: ProjectConfiguration | None = None
    gradient_accumulation_plugin: GradientAccumulationPlugin | None = None
    step_scheduler_with_optimizer: bool = True
    step_scheduler_per: StepPer | None = None
    strategy: str | StrategySpec | None = None
    kwargs_handlers: Sequence[KwargsHandler] | None = None
    dynamo_backend: DynamoBackend | str | None = None
    dynamo_plugin: TorchDynamoPlugin | None = None
    plugins: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @classmethod
    def of(cls, **arguments: Any) -> AcceleratorConfig:
        """Sort the arguments of `Accelerator`: plugins by name, the two of DeepSpeed as one.

        Example:
            >>> AcceleratorConfig.of(cpu=True, deepspeed_plugin=None, deepspeed_plugins={"zero3": 3}).plugins
            {'deepspeed_plugin': {'zero3': 3}}
        """
        several = arguments.pop("deepspeed_plugins", None)
        if several is not None:
            if arguments.get("deepspeed_plugin") is not None:
                raise SettingsError(
                    f"Accelerator(deepspeed_plugin={arguments['deepspeed_plugin']!r}, "
                    f"deepspeed_plugins={several!r}): give one of the two."
                )
            arguments["deepspeed_plugin"] = several
        names = [engine.argument for engine in ENGINES if engine.argument in arguments]
        return cls(plugins={name: arguments.pop(name) for name in names}, **arguments)


def sort_handlers(handlers: Iterable[KwargsHandler]) -> dict[type, Any]:
    """Index kwargs handlers by type.

    Example:
        >>> sort_handlers([AutocastKwargs(enabled=False)])
        {<class 'accel_plugins.kwargs.AutocastKwargs'>: AutocastKwargs(enabled=False, cache_enabled=None)}
    """
    found: dict[type, Any] = {}
    for handler in handlers:
        kind = next((known for known in HANDLERS if isinstance(handler, known)), None)
        if kind is None:
            more = [known for spec in RECIPES.available().values() for known in spec.handlers]
            kind = next((known for known in more if isinstance(handler, known)), None)
        if kind is None:
            names = ", ".join(known.__name__ for known in HANDLERS)
            raise SettingsError(f"kwargs_handlers contains {handler!r}; it takes one of each of {names}.")
        if kind in found:
            raise SettingsError(
                f"kwargs_handlers contains two {kind.__name__}: {found[kind]!r} and {handler!r}; pass one."
            )
        found[kind] = handler
    return found


def selected_strategy(strategy: str | StrategySpec | None, settings: Settings) -> StrategySpec | None:
    """Return the selected strategy: of the argument, else an earlier `Accelerator`, else the settings."""
    if isinstance(strategy, StrategySpec):
        return strategy
    if strategy is not None:
        if not isinstance(strategy, str):
            raise SettingsError(f"Accelerator(strategy={strategy!r}): expected a name or a StrategySpec.")
        return STRATEGIES.find(strategy, source=f"Accelerator(strategy={strategy!r})")
    known: StrategySpec | None = AcceleratorState._shared_state.get("strategy")  # pyright: ignore[reportPrivateUsage] - asks without making one
    name = settings.training.strategy
    if known is not None or name is None:
        return known
    return STRATEGIES.find(name, source=f"environment variable ACCELERATE_STRATEGY={name!r}")


def accumulation_plugin(
    arguments: AcceleratorConfig, settings: Settings, plugins: Mapping[str, Any]
) -> GradientAccumulationPlugin:
    """Return how gradients are accumulated; `settings` are those of the environment, without the plugins'."""
    steps, plugin = arguments.gradient_accumulation_steps, arguments.gradient_accumulation_plugin
    if plugin is None:
        plugin = GradientAccumulationPlugin(num_steps=None if steps == 1 else steps)
    elif steps != 1:
        raise SettingsError(
            f"Accelerator(gradient_accumulation_steps={steps!r}, gradient_accumulation_plugin={plugin!r}): "
            "give one of the two."
        )
    if plugin.num_steps is None:
        plugin = replace(plugin, num_steps=settings.training.gradient_accumulation_steps)
    engine: Any = plugins.get("deepspeed_plugin")
    engine = next(iter(engine.values())) if isinstance(engine, dict) else engine
    configured: int | None = None if engine is None else engine.gradient_accumulation_steps
    if configured is not None and configured != plugin.num_steps:
        logger.warning_once(
            "Accelerator has gradient_accumulation_steps=%r, and the DeepSpeed configuration %r, which is "
            "used; say it in one place, or 'auto' in the configuration.",
            plugin.num_steps,
            configured,
        )
        return replace(plugin, num_steps=configured)
    return plugin


def dataloader_configuration(arguments: AcceleratorConfig) -> DataLoaderConfiguration:
    """Return how loaders are prepared."""
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


def checked_rng_types(rng_types: Sequence[str | RNGType] | None) -> list[str | RNGType]:
    """Return the sources of randomness that loaders synchronise."""
    types: list[str | RNGType] = ["generator"] if rng_types is None else [*rng_types]
    for one in types:
        if one not in RNGType:
            raise SettingsError(
                f"rng_types contains {one!r}; it takes {', '.join(map(repr, RNGType.list()))}."
            )
    return types


def project_configuration(arguments: AcceleratorConfig) -> ProjectConfiguration:
    """Return the project's directories."""
    config = arguments.project_config
    if config is None:
        return ProjectConfiguration(project_dir=arguments.project_dir)
    if arguments.project_dir is not None and config.project_dir is None:
        config.set_directories(arguments.project_dir)
    return config


def dynamo_plugin(arguments: AcceleratorConfig) -> TorchDynamoPlugin:
    """Return how models are compiled."""
    backend, plugin = arguments.dynamo_backend, arguments.dynamo_plugin
    if plugin is None:
        return TorchDynamoPlugin(backend=backend)
    if backend is not None:
        raise SettingsError(
            f"Accelerator(dynamo_backend={backend!r}, dynamo_plugin={plugin!r}): give one of the two."
        )
    return plugin


def scheduler_clock(arguments: AcceleratorConfig) -> StepPer | None:
    """Return by which clock schedules move."""
    step_per = arguments.step_scheduler_per
    check_clock(step_per, "step_scheduler_per")
    if step_per is not None and not arguments.step_scheduler_with_optimizer:
        raise SettingsError(
            f"Accelerator(step_scheduler_per={step_per!r}, step_scheduler_with_optimizer=False): without the "
            "optimizer every call of step() is one step of the schedule; leave one of the two out."
        )
    return step_per


# What `AcceleratorState` calls otherwise.
_STATE_NAMES = {"deepspeed_plugin": "deepspeed_plugins"}


def known_plugins() -> dict[str, Any]:
    """Return the plugins of an earlier `Accelerator` of this process, by argument."""
    known = AcceleratorState._shared_state  # pyright: ignore[reportPrivateUsage] - asks without making one
    return {
        engine.argument: known.get(_STATE_NAMES.get(engine.argument, engine.argument)) for engine in ENGINES
    }


@contextmanager
def unchanged_by_failure() -> Generator[None]:
    """Restore the shared state if the block raises."""
    shared = AcceleratorState._shared_state  # pyright: ignore[reportPrivateUsage] - as above
    before = dict(shared)
    try:
        yield
    except BaseException:
        shared.clear()
        shared.update(before)
        raise


@dataclass(slots=True)
class PreparedObjects:
    """The objects that one `Accelerator` has prepared, in order."""

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
        """Release all prepared objects."""
        for kind in (self.models, self.optimizers, self.schedulers, self.dataloaders):
            kind.clear()


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Everything that the facets of an `Accelerator` work with; only `prepared` and the states change.

    Args:
        engine: Takes the calls of models, where the strategy has a `train_step`.
        backward: Computes gradients, with what is done around that.
        step: Steps an optimizer, with what is done afterwards.
        after_step: Runs after a step of an optimizer.
        converter: Converts models, where the precision is a recipe.
        items: Counts items, where losses are sums.
        handlers: Every given kwargs handler, and every plugin, by its type.
        meter: Measures the loop; `None` if nobody asked for it.
    """

    process: PartialState
    state: AcceleratorState
    gradient_state: GradientState
    strategy: Strategy
    engine: EngineCalls | None
    backward: Callable[..., None]
    step: Callable[..., bool | torch.Tensor]
    after_step: Sequence[Callable[[], None] | None]
    precision: PrecisionPolicy
    converter: RecipeApplier | None
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
    prepared: PreparedObjects
    checkpoints: CheckpointContext
    trackers: TrackerSession
    meter: StepMeter | None


def build_parts(arguments: AcceleratorConfig) -> Parts:
    """Read the settings, start the process group if there is none yet, and put an `Accelerator` together."""
    settings = from_environ(variables := environ.read())
    selected = selected_strategy(arguments.strategy, settings)
    handlers = sort_handlers(arguments.kwargs_handlers or ())
    dataloading, rng_types = dataloader_configuration(arguments), checked_rng_types(arguments.rng_types)
    project, trackers = _project_and_trackers(arguments)
    compiler = dynamo_plugin(arguments)
    plugins = find_plugins(arguments.plugins, known_plugins(), settings, selected and selected.sections)
    accumulation = accumulation_plugin(arguments, settings, plugins)
    settings = with_plugin_fields(settings, plugins)
    with unchanged_by_failure():
        state = _state(arguments, settings, variables, handlers, compiler, plugins)
        runtime = PartialState().runtime
        handlers |= {**as_handlers(plugins), TorchDynamoPlugin: compiler}
        every = {**handlers, GradientAccumulationPlugin: accumulation, DataLoaderConfiguration: dataloading}
        recipe = build_recipe(state.mixed_precision, settings, runtime, every)
        base = recipe.precision if recipe else state.mixed_precision
        strategy, precision = _strategy(settings, selected, base, runtime, every)
    state.strategy, state.device_mesh = selected, strategy.mesh
    gradient_state, synchronizer, prepared, meter = _loop_state(arguments, accumulation, strategy, runtime)
    engine = None if strategy.train_step is None else EngineCalls(strategy, gradient_state)
    after_step = (strategy.after_step, _after_step(recipe, prepared))
    return Parts(
        process=PartialState(),
        state=state,
        gradient_state=gradient_state,
        strategy=strategy,
        engine=engine,
        backward=bind_backward(strategy, engine, strategy.after_micro_batch),
        step=bind_step(strategy.stepper.step, after_step),
        after_step=after_step,
        precision=precision,
        converter=None if recipe is None else RecipeApplier(recipe, runtime),
        compiler=compiler,
        synchronizer=synchronizer,
        items=ItemWindow(runtime, prepared.parameters, meter),
        trigger=Trigger(runtime),
        handlers=handlers,
        dataloading=dataloading,
        rng_types=rng_types,
        project=project,
        device_placement=arguments.device_placement,
        step_scheduler_with_optimizer=arguments.step_scheduler_with_optimizer,
        step_scheduler_per=scheduler_clock(arguments),
        prepared=prepared,
        checkpoints=CheckpointContext(runtime, project, prepared, synchronizer, strategy, precision, recipe),
        trackers=trackers,
        meter=meter,
    )


def _loop_state(
    arguments: AcceleratorConfig,
    accumulation: GradientAccumulationPlugin,
    strategy: Strategy,
    runtime: Runtime,
) -> tuple[GradientState, Synchronizer, PreparedObjects, StepMeter | None]:
    """Make the state of the training loop, and its meter if it is asked for."""
    gradient_state, prepared = GradientState(gradient_accumulation_plugin=accumulation), PreparedObjects()
    meter = StepMeter(gradient_state, prepared.optimizers, runtime) if arguments.log_system_metrics else None
    alone = runtime.topology.world_size == 1
    synchronizer = Synchronizer(gradient_state, None if alone else strategy.stepper.no_sync)
    return gradient_state, synchronizer, prepared, meter


def _after_step(recipe: Recipe | None, prepared: PreparedObjects) -> Callable[[], None] | None:
    act = None if recipe is None else recipe.after_step
    return None if act is None else lambda: act(prepared.models)


def _project_and_trackers(arguments: AcceleratorConfig) -> tuple[ProjectConfiguration, TrackerSession]:
    project = project_configuration(arguments)
    where, on_error = project.logging_dir, arguments.on_tracker_error
    return project, TrackerSession(arguments.log_with, where, on_error=on_error)


def _strategy(
    settings: Settings,
    selected: StrategySpec | None,
    mixed_precision: str,
    runtime: Runtime,
    handlers: Mapping[type, Any],
) -> tuple[Strategy, PrecisionPolicy]:
    """Choose the strategy, and build it with its precision policy."""
    specs = STRATEGIES.available()
    name = None if selected is None else selected.name
    settings = replace(settings, training=replace(settings.training, strategy=name))
    if selected is not None:
        specs[selected.name] = selected
    name = choose(settings, runtime.topology, runtime.device, specs)
    precision = build_precision(
        mixed_precision,
        runtime.device,
        handlers.get(AutocastKwargs),
        handlers.get(GradScalerKwargs),
        shared=specs[name].shards_gradients,
        master_weights=specs[name].master_weights,
    )
    strategy = load(specs[name])(settings, runtime, precision, handlers)
    return strategy, strategy.precision or precision


def _state(
    arguments: AcceleratorConfig,
    settings: Settings,
    variables: Mapping[str, str],
    handlers: Mapping[type, Any],
    compiler: TorchDynamoPlugin,
    plugins: Mapping[str, Any],
) -> AcceleratorState:
    handler = handlers.get(InitProcessGroupKwargs)
    options = {} if handler is None else handler.to_kwargs()
    PartialState._from_settings(settings, variables, arguments.cpu, options)  # pyright: ignore[reportPrivateUsage] - ours
    precision = arguments.mixed_precision
    if precision is None and not is_initialized():  # else that of the state stays
        precision = settings.precision.mixed_precision
    return AcceleratorState(
        mixed_precision=precision,
        cpu=arguments.cpu,
        dynamo_plugin=compiler,
        _from_accelerator=True,
        **plugins,
        **options,
    )
