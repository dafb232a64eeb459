"""Build the parts of an `Accelerator` from its arguments (a frozen record) and the environment."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_plugins.ddp import DistributedDataParallelKwargs
from accel_plugins.fp8.build import build_recipe
from accel_plugins.fp8.recipe import FP8_HANDLERS, Recipe
from accel_plugins.kwargs import (
    AutocastKwargs,
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
    ProfileKwargs,
    ProjectConfiguration,
    ReplicaSyncKwargs,
    TilingKwargs,
    TorchDynamoPlugin,
)
from accel_plugins.optimizer import AcceleratedOptimizer, AcceleratedScheduler, StepPer, check_clock
from accel_plugins.precision import build_precision, compute_in_float32
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
from accel_state import environ, hang_monitor
from accel_state.accelerator_state import AcceleratorState, GradientState, is_initialized
from accel_state.errors import SettingsError
from accel_state.frozen import frozen
from accel_state.labels import DynamoBackend, PrecisionType, RNGType
from accel_state.logging import get_logger
from accel_state.partial_state import PartialState
from accel_state.runtime import Runtime
from accel_state.settings import Settings
from accel_state.settings.model import from_environ
from accel_trackers.session import OnTrackerError, TrackerSession
from accel_train import checkpoint
from accel_train.accelerator.prepare import RecipeApplier
from accel_train.checkpoint.context import CheckpointContext
from accel_train.healing import share_state
from accel_train.profiling import StepMeter
from accel_train.step import EngineCalls, ItemWindow, Synchronizer, Trigger, bind_backward, bind_step

if TYPE_CHECKING:
    import torch
    from torch import nn

    from accel_train.checkpoint.preemption import Preemption


logger = get_logger(__name__)


class _Unset:
    """The default of `split_batches`, which distinguishes an absent argument from `False`."""

    def __repr__(self) -> str:
        return "<unset>"


UNSET: Any = _Unset()


@frozen
class AcceleratorConfig:
    """The unchecked arguments of `Accelerator`, which documents them."""

    device_placement: bool = True
    split_batches: bool = UNSET
    mixed_precision: PrecisionType | str | None = None
    gradient_accumulation_steps: int = 1
    cpu: bool = False
    dataloader_config: DataLoaderConfiguration | None = None
    deepspeed_plugin: Any = None
    fsdp_plugin: Any = None
    torch_tp_plugin: Any = None
    megatron_lm_plugin: Any = None
    rng_types: Sequence[str | RNGType] | None = None
    log_with: Any = None
    project_dir: str | Path | None = None
    project_config: ProjectConfiguration | None = None
    gradient_accumulation_plugin: GradientAccumulationPlugin | None = None
    step_scheduler_with_optimizer: bool = True
    kwargs_handlers: Sequence[KwargsHandler] | None = None
    dynamo_backend: DynamoBackend | str | None = None
    dynamo_plugin: TorchDynamoPlugin | None = None
    deepspeed_plugins: Any = None
    parallelism_config: Any = None
    step_scheduler_per: StepPer | None = None
    on_tracker_error: OnTrackerError = "raise"
    strategy: str | StrategySpec | None = None
    log_system_metrics: bool = False

    def plugins(self) -> dict[str, Any]:
        """Return the plugins by argument name, with DeepSpeed's two arguments merged into one.

        Example:
            >>> AcceleratorConfig(deepspeed_plugins={"zero3": 3}).plugins()["deepspeed_plugin"]
            {'zero3': 3}
        """
        plugins = {engine.argument: getattr(self, engine.argument) for engine in ENGINES}
        if self.deepspeed_plugins is not None:
            if self.deepspeed_plugin is not None:
                raise SettingsError(
                    f"Accelerator(deepspeed_plugin={self.deepspeed_plugin!r}, "
                    f"deepspeed_plugins={self.deepspeed_plugins!r}): pass only one of the two."
                )
            plugins["deepspeed_plugin"] = self.deepspeed_plugins
        return plugins


@dataclass(slots=True)
class PreparedObjects:
    """The objects that one `Accelerator` has prepared, in order."""

    models: list[nn.Module] = field(default_factory=list["nn.Module"])
    optimizers: list[AcceleratedOptimizer] = field(default_factory=list["AcceleratedOptimizer"])
    schedulers: list[AcceleratedScheduler] = field(default_factory=list["AcceleratedScheduler"])
    dataloaders: list[Any] = field(default_factory=list[Any])
    released_steps: int = 0

    def __contains__(self, candidate: object) -> bool:
        kinds = (self.models, self.optimizers, self.schedulers, self.dataloaders)
        return any(candidate is prepared for kind in kinds for prepared in kind)

    def num_steps(self) -> int:
        """Return the largest step count of any optimizer, plus the steps of released optimizers."""
        return self.released_steps + max((optimizer.num_steps for optimizer in self.optimizers), default=0)

    def parameters(self) -> Iterator[torch.Tensor]:
        """Iterate over the parameters of optimizers and models; some occur more than once."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                yield from group["params"]
        for model in self.models:
            yield from model.parameters()

    def clear(self) -> None:
        """Release all prepared objects."""
        self.released_steps = self.num_steps()
        for kind in (self.models, self.optimizers, self.schedulers, self.dataloaders):
            kind.clear()


@frozen
class Parts:
    """The components that the facets of an `Accelerator` share; only `prepared` and the states change.

    Args:
        engine: Routes model calls to the strategy's `train_step`, if it has one.
        backward: Computes gradients, then calls the strategy's micro-batch hook.
        step: Steps an optimizer, then calls `after_step`.
        after_step: Hooks of the strategy and of the recipe, called after each optimizer step.
        converter: Converts models if the precision is a recipe.
        items: Counts items for summed losses (`num_items`).
        handlers: The kwargs handlers of `Accelerator`, and the plugins, by type.
        meter: Measures the training loop, with `log_system_metrics`.
        preemption: Saves and exits when the job is preempted, with `save_on_preemption`.
        native_amp: What a script has assigned to `native_amp`.
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
    handlers: dict[type, Any]
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
    preemption: Preemption | None
    native_amp: bool | None = None

    @property
    def fp8_backend(self) -> str:
        """The library of FP8 matrix multiplication; `"NO"` without FP8."""
        return self.converter.recipe.backend if self.converter else "NO"


@frozen
class StartedParts:
    """The parts that exist before a strategy is built."""

    process: PartialState
    state: AcceleratorState


def build_parts(config: AcceleratorConfig, accelerator: Any) -> Parts:
    """Read the settings, start the process group if there is none yet, and build the parts."""
    # 1. Check the arguments, before anything is started.
    settings = from_environ(variables := environ.read())
    requested_plugins = config.plugins()
    selected = select_strategy(config.strategy, settings)
    handlers = index_handlers(config.kwargs_handlers or ())
    dataloading, rng_types = resolve_dataloading(config), check_rng_types(config.rng_types)
    project, compiler = resolve_project(config), resolve_compiler(config)
    trackers = TrackerSession(config.log_with, project.logging_dir, on_error=config.on_tracker_error)
    check_scheduler_clock(config)
    tiling = TilingKwargs()  # from the environment, if no handler was given
    # 2. Choose the plugins; their settings override the environment.
    plugins = find_plugins(requested_plugins, earlier_plugins(), settings, selected and selected.sections)
    accumulation = resolve_accumulation(config, settings, plugins)
    settings = with_plugin_fields(settings, plugins)
    # 3. Start the process group, and build the precision policy and the strategy for its ranks.
    with restore_state_on_failure():
        state = _make_state(config, settings, variables, handlers, compiler, plugins)
        process = PartialState()
        runtime = process.runtime
        if state.parallelism_config is not None:
            accelerator._parts = StartedParts(process=process, state=state)
            state.parallelism_config._validate_accelerator(accelerator)
            del accelerator._parts
        handlers |= {**as_handlers(plugins), TorchDynamoPlugin: compiler}
        handlers.setdefault(TilingKwargs, tiling)
        options = {**handlers, GradientAccumulationPlugin: accumulation, DataLoaderConfiguration: dataloading}
        recipe = build_recipe(state.mixed_precision, settings, runtime, options)
        base = "bf16" if recipe else state.mixed_precision
        strategy, precision = _build_strategy(settings, selected, base, runtime, options)
    state.strategy, state.device_mesh = selected, strategy.mesh
    vars(state)["_fsdp_version"] = strategy.fsdp_version
    # 4. Create the state of the training loop.
    gradient_state, prepared = GradientState(gradient_accumulation_plugin=accumulation), PreparedObjects()
    meter = StepMeter(gradient_state, prepared, runtime) if config.log_system_metrics else None
    no_sync = None if runtime.topology.world_size == 1 else strategy.stepper.no_sync
    synchronizer = Synchronizer(gradient_state, no_sync, prepared.optimizers)
    engine = None if strategy.train_step is None else EngineCalls(strategy, gradient_state)
    checkpoints = CheckpointContext(runtime, project, prepared, synchronizer, strategy, precision, recipe)
    preemption = _start_preemption(checkpoints, accelerator, variables)
    after_step = _hooks_after_step(strategy, recipe, prepared, preemption)
    if strategy.replicas is not None:
        share_state(strategy.replicas, checkpoints, accelerator)
    monitor = hang_monitor.active()
    if monitor is not None and settings.process.name_stragglers:
        monitor.name_stragglers(prepared.num_steps)
    return Parts(
        process=process,
        state=state,
        gradient_state=gradient_state,
        strategy=strategy,
        engine=engine,
        backward=bind_backward(strategy, engine, strategy.after_micro_batch),
        step=bind_step(strategy.stepper.step, after_step),
        after_step=after_step,
        precision=precision,
        converter=None if recipe is None else RecipeApplier(recipe),
        compiler=compiler,
        synchronizer=synchronizer,
        items=ItemWindow(runtime, prepared.parameters, meter),
        trigger=Trigger(runtime),
        handlers=options,
        dataloading=dataloading,
        rng_types=rng_types,
        project=project,
        device_placement=config.device_placement,
        step_scheduler_with_optimizer=config.step_scheduler_with_optimizer,
        step_scheduler_per=config.step_scheduler_per,
        prepared=prepared,
        checkpoints=checkpoints,
        trackers=trackers,
        meter=meter,
        preemption=preemption,
    )


def _hooks_after_step(
    strategy: Strategy, recipe: Recipe | None, prepared: PreparedObjects, preemption: Preemption | None
) -> tuple[Callable[[], None] | None, ...]:
    hook = None if recipe is None else recipe.compute_scales
    return (
        strategy.after_step,
        hook and (lambda: hook(prepared.models)),
        preemption and preemption.count_optimizer_step,
    )


def with_recipe_handler(parts: Parts, handler: KwargsHandler | None) -> Parts:
    """Return the parts with the FP8 recipe of another handler, which applies to models prepared later.

    A run has one recipe, so the handler replaces any other. Without FP8, the handler is kept but not used.
    """
    handlers = {kind: known for kind, known in parts.handlers.items() if kind not in FP8_HANDLERS}
    handlers |= index_handlers(() if handler is None else [handler])
    runtime, converter = parts.process.runtime, parts.converter
    recipe = converter and build_recipe("fp8", from_environ(environ.read()), runtime, handlers)
    if recipe is None:
        return replace(parts, handlers=handlers)
    after_step = _hooks_after_step(parts.strategy, recipe, parts.prepared, parts.preemption)
    parts.checkpoints.recipe = recipe
    return replace(
        parts,
        handlers=handlers,
        converter=RecipeApplier(recipe),
        after_step=after_step,
        step=bind_step(parts.strategy.stepper.step, after_step),
    )


def _start_preemption(
    checkpoints: CheckpointContext, accelerator: Any, variables: Mapping[str, str]
) -> Preemption | None:
    """Install handlers for the preemption signals of job schedulers, if requested."""
    if not checkpoints.project.save_on_preemption:
        return None
    _ = checkpoints.numbered  # refuses a project without a directory
    is_restarted = variables.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
    preemption = checkpoint.preemption.Preemption(
        checkpoints.runtime, accelerator.save_state, is_restarted=is_restarted
    )
    preemption.install()
    return preemption


def select_strategy(strategy: str | StrategySpec | None, settings: Settings) -> StrategySpec | None:
    """Return the strategy from the argument, else from an earlier `Accelerator`, else from the settings."""
    if isinstance(strategy, StrategySpec):
        return strategy
    if strategy is not None:
        if not isinstance(strategy, str):
            raise SettingsError(f"Accelerator(strategy={strategy!r}): expected a name or a StrategySpec.")
        return STRATEGIES.find(strategy, source=f"Accelerator(strategy={strategy!r})")
    earlier: StrategySpec | None = AcceleratorState._shared_state.get("strategy")  # pyright: ignore[reportPrivateUsage] - asks without making one
    name = settings.training.strategy
    if earlier is not None or name is None:
        return earlier
    return STRATEGIES.find(name, source=f"environment variable ACCELERATE_STRATEGY={name!r}")


HANDLERS: tuple[type[Any], ...] = (
    AutocastKwargs,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProfileKwargs,
    ReplicaSyncKwargs,
    TilingKwargs,
    *FP8_HANDLERS,
)
"""The types that `Accelerator(kwargs_handlers=[…])` accepts, one of each."""


def index_handlers(handlers: Iterable[KwargsHandler]) -> dict[type, Any]:
    """Index kwargs handlers by type.

    Example:
        >>> index_handlers([AutocastKwargs(enabled=False)])
        {<class 'accel_plugins.kwargs.AutocastKwargs'>: AutocastKwargs(enabled=False, cache_enabled=None)}
    """
    by_type: dict[type, Any] = {}
    for handler in handlers:
        kind = next((known for known in HANDLERS if isinstance(handler, known)), None)
        if kind is None:
            names = ", ".join(known.__name__ for known in HANDLERS)
            raise SettingsError(f"kwargs_handlers contains {handler!r}; accepted are one of each of {names}.")
        if kind in by_type:
            raise SettingsError(
                f"kwargs_handlers contains two {kind.__name__}: {by_type[kind]!r} and {handler!r}; pass "
                "only one."
            )
        by_type[kind] = handler
    return by_type


def resolve_dataloading(config: AcceleratorConfig) -> DataLoaderConfiguration:
    """Return the data loader options; refuse a contradicting `split_batches`."""
    dataloading, split = config.dataloader_config, config.split_batches
    if split is UNSET:
        return DataLoaderConfiguration() if dataloading is None else dataloading
    if dataloading is None:
        return DataLoaderConfiguration(split_batches=split)
    if dataloading.split_batches != split:
        raise SettingsError(
            f"Accelerator(split_batches={split!r}, dataloader_config={dataloading!r}): the two "
            "contradict each other. Set it only in dataloader_config."
        )
    return dataloading


def check_rng_types(rng_types: Sequence[str | RNGType] | None) -> list[str | RNGType]:
    """Return the random generators that loaders synchronise; reject unknown names."""
    types: list[str | RNGType] = ["generator"] if rng_types is None else [*rng_types]
    for rng_type in types:
        if rng_type not in RNGType:
            raise SettingsError(
                f"rng_types contains {rng_type!r}; accepted are {', '.join(map(repr, RNGType.list()))}."
            )
    return types


def resolve_project(config: AcceleratorConfig) -> ProjectConfiguration:
    """Return the project's directories."""
    project = config.project_config
    if project is None:
        return ProjectConfiguration(project_dir=config.project_dir)
    if config.project_dir is not None and project.project_dir is None:
        project.set_directories(config.project_dir)
    return project


def resolve_compiler(config: AcceleratorConfig) -> TorchDynamoPlugin:
    """Return the `torch.compile` options."""
    backend, plugin = config.dynamo_backend, config.dynamo_plugin
    if plugin is None:
        return TorchDynamoPlugin(backend=backend)
    if backend is not None:
        raise SettingsError(
            f"Accelerator(dynamo_backend={backend!r}, dynamo_plugin={plugin!r}): pass only one of the two."
        )
    return plugin


def check_scheduler_clock(config: AcceleratorConfig) -> None:
    """Reject an unknown `step_scheduler_per`, and any value if schedulers do not follow the optimizer."""
    step_per = config.step_scheduler_per
    check_clock(step_per, "step_scheduler_per")
    if step_per is not None and not config.step_scheduler_with_optimizer:
        raise SettingsError(
            f"Accelerator(step_scheduler_per={step_per!r}, step_scheduler_with_optimizer=False): "
            "without the optimizer, every call of step() is one step of the schedule. Remove one of the two."
        )


def earlier_plugins() -> dict[str, Any]:
    """Return the plugins of an earlier `Accelerator` of this process, by argument."""
    shared = AcceleratorState._shared_state  # pyright: ignore[reportPrivateUsage] - asks without making one
    names = {engine.argument: engine.argument for engine in ENGINES}
    names["deepspeed_plugin"] = "deepspeed_plugins"  # the state keeps all of them by name
    return {argument: shared.get(name) for argument, name in names.items()}


def resolve_accumulation(
    config: AcceleratorConfig, settings: Settings, plugins: Mapping[str, Any]
) -> GradientAccumulationPlugin:
    """Return the gradient accumulation plugin; `settings` are from the environment only, without plugins."""
    steps, accumulation = config.gradient_accumulation_steps, config.gradient_accumulation_plugin
    if accumulation is None:
        accumulation = GradientAccumulationPlugin(num_steps=None if steps == 1 else steps)
    elif steps != 1:
        raise SettingsError(
            f"Accelerator(gradient_accumulation_steps={steps!r}, "
            f"gradient_accumulation_plugin={accumulation!r}): pass only one of the two."
        )
    if accumulation.num_steps is None:
        accumulation = replace(accumulation, num_steps=settings.training.gradient_accumulation_steps)
    deepspeed: Any = plugins.get("deepspeed_plugin")
    deepspeed = next(iter(deepspeed.values())) if isinstance(deepspeed, dict) else deepspeed
    configured: int | None = None if deepspeed is None else deepspeed.gradient_accumulation_steps
    if configured is not None and configured != accumulation.num_steps:
        logger.warning_once(
            "Accelerator has gradient_accumulation_steps=%r, and the DeepSpeed configuration %r, which "
            "takes effect. Set it in one place, or use 'auto' in the configuration.",
            accumulation.num_steps,
            configured,
        )
        return replace(accumulation, num_steps=configured)
    return accumulation


@contextmanager
def restore_state_on_failure() -> Generator[None]:
    """Restore the shared state if the block raises."""
    shared = AcceleratorState._shared_state  # pyright: ignore[reportPrivateUsage] - as above
    before = dict(shared)
    try:
        yield
    except BaseException:
        shared.clear()
        shared.update(before)
        raise


def _make_state(
    config: AcceleratorConfig,
    settings: Settings,
    variables: Mapping[str, str],
    handlers: Mapping[type, Any],
    compiler: TorchDynamoPlugin,
    plugins: Mapping[str, Any],
) -> AcceleratorState:
    handler = handlers.get(InitProcessGroupKwargs)
    options = {} if handler is None else handler.to_kwargs()
    PartialState._from_settings(settings, variables, config.cpu, options)  # pyright: ignore[reportPrivateUsage] - ours
    mixed_precision = config.mixed_precision
    if mixed_precision is None and not is_initialized():  # an earlier state keeps its precision
        mixed_precision = settings.precision.mixed_precision
    return AcceleratorState(
        mixed_precision=mixed_precision,
        cpu=config.cpu,
        dynamo_plugin=compiler,
        _from_accelerator=True,
        **plugins,
        **options,
    )


def _build_strategy(
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
    spec = specs[choose(settings, runtime.topology, runtime.device, specs)]
    precision = build_precision(
        mixed_precision,
        runtime.device,
        handlers.get(AutocastKwargs),
        handlers.get(GradScalerKwargs),
        shared=spec.shards_gradients,
        master_weights=spec.master_weights,
    )
    is_on_cpu = mixed_precision == "fp16" and runtime.device.type == "cpu"
    ignores = is_on_cpu and GradScalerKwargs not in handlers and not spec.shards_gradients
    if ignores:
        precision = compute_in_float32(precision)
    strategy = load(spec)(settings, runtime, precision, handlers)
    if ignores and strategy.precision is None:
        logger.warning_once(
            "mixed_precision='fp16' on the CPU computes in float32, as with Accelerate; 'bf16' is "
            "faster if the CPU has instructions for it. Pass kwargs_handlers=[GradScalerKwargs()] to "
            "compute in float16."
        )
    return strategy, strategy.precision or precision
