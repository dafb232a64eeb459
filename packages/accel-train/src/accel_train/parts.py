"""The composition root: the parts of an `Accelerator`, and the one function that builds them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from accel_plugins.kwargs.amp import AutocastKwargs, GradScalerKwargs
from accel_plugins.kwargs.dynamo import TorchDynamoPlugin
from accel_plugins.kwargs.run import (
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
    InitProcessGroupKwargs,
)
from accel_plugins.plugin_specs import as_handlers, described, find_plugins
from accel_plugins.precision import build_precision
from accel_plugins.recipe import build_recipe
from accel_plugins.registry import STRATEGIES, choose, load
from accel_state import environ
from accel_state.accelerator_state import AcceleratorState, is_initialized
from accel_state.gradient_state import GradientState
from accel_state.logging import get_logger
from accel_state.partial_state import PartialState
from accel_state.settings.environ import from_environ
from accel_trackers.session import TrackerSession
from accel_train.arguments import (
    accumulation_plugin,
    checked_rng_types,
    dataloader_configuration,
    dynamo_plugin,
    known_plugins,
    project_configuration,
    scheduler_clock,
    selected_strategy,
    sort_handlers,
    unchanged_by_failure,
)
from accel_train.bound import EngineCalls, bind_backward, bind_step
from accel_train.checkpoint.run import Run
from accel_train.prepare.stages import Converter
from accel_train.step_meter import StepMeter
from accel_train.sync import Synchronizer
from accel_train.token_normalizer import ItemWindow
from accel_train.triggers import Trigger

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import torch
    from torch import nn

    from accel_plugins.kwargs.base import KwargsHandler
    from accel_plugins.kwargs.run import ProjectConfiguration
    from accel_plugins.recipe import Recipe
    from accel_plugins.roles import PrecisionPolicy
    from accel_plugins.strategy import Strategy, StrategySpec
    from accel_state.labels import RNGType
    from accel_state.runtime import Runtime
    from accel_state.settings import Settings
    from accel_train.arguments import Arguments
    from accel_train.optimizer import AcceleratedOptimizer
    from accel_train.scheduler import AcceleratedScheduler, StepPer

logger = get_logger(__name__)


@dataclass(slots=True)
class Prepared:
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
    converter: Converter | None
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
    meter: StepMeter | None


def build_parts(arguments: Arguments) -> Parts:
    """Read the settings, start the process group if there is none yet, and put an `Accelerator` together."""
    settings = from_environ(variables := environ.read())
    selected = selected_strategy(arguments.strategy, settings)
    handlers = sort_handlers(arguments.kwargs_handlers or ())
    dataloading, rng_types = dataloader_configuration(arguments), checked_rng_types(arguments.rng_types)
    project, trackers = _project_and_trackers(arguments)
    compiler = dynamo_plugin(arguments)
    plugins = find_plugins(arguments.plugins, known_plugins(), settings, selected and selected.sections)
    accumulation = accumulation_plugin(arguments, settings, plugins)
    settings = described(settings, plugins)
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
        converter=None if recipe is None else Converter(recipe, runtime),
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
        checkpoints=Run(runtime, project, prepared, synchronizer, strategy, precision, recipe),
        trackers=trackers,
        meter=meter,
    )


def _loop_state(
    arguments: Arguments, accumulation: GradientAccumulationPlugin, strategy: Strategy, runtime: Runtime
) -> tuple[GradientState, Synchronizer, Prepared, StepMeter | None]:
    """Make the state of the training loop, and its meter if it is asked for."""
    gradient_state, prepared = GradientState(gradient_accumulation_plugin=accumulation), Prepared()
    meter = StepMeter(gradient_state, prepared.optimizers, runtime) if arguments.log_system_metrics else None
    alone = runtime.topology.world_size == 1
    synchronizer = Synchronizer(gradient_state, None if alone else strategy.stepper.no_sync)
    return gradient_state, synchronizer, prepared, meter


def _after_step(recipe: Recipe | None, prepared: Prepared) -> Callable[[], None] | None:
    act = None if recipe is None else recipe.after_step
    return None if act is None else lambda: act(prepared.models)


def _project_and_trackers(arguments: Arguments) -> tuple[ProjectConfiguration, TrackerSession]:
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
    arguments: Arguments,
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
