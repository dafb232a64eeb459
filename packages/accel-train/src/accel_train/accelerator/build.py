"""Check and resolve the arguments of `Accelerator`; build the state, the strategy and its precision."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from accel_plugins.ddp import DistributedDataParallelKwargs
from accel_plugins.fp8.recipe import FP8_HANDLERS, Recipe, build_recipe
from accel_plugins.kwargs import (
    AutocastKwargs,
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
    ProfileKwargs,
    ReplicaSyncKwargs,
    StepGuard,
    TilingKwargs,
    TorchDynamoPlugin,
)
from accel_plugins.optimizer import AcceleratedOptimizer, AcceleratedScheduler
from accel_plugins.precision import build_precision, compute_in_float32
from accel_plugins.registry import ENGINES, STRATEGIES, choose, load
from accel_plugins.step_guard import guard_steps
from accel_plugins.strategy import PrecisionPolicy, Strategy, StrategySpec
from accel_state import environ
from accel_state.accelerator_state import AcceleratorState, GradientState
from accel_state.errors import SettingsError
from accel_state.logging import get_logger
from accel_state.runtime import Runtime
from accel_state.settings import Settings
from accel_state.settings.model import from_environ
from accel_trackers.session import TrackerSession
from accel_train import checkpoint, observing
from accel_train.checkpoint.context import CheckpointContext
from accel_train.profiling import StepMeter
from accel_train.step import EngineCalls, ItemWindow, Synchronizer, bind_step

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


@dataclass(slots=True)
class Parts:
    """The components of an `Accelerator`, which the stages of `prepare` use and may replace.

    Args:
        engine: Routes model calls to the strategy's `train_step`, if it has one.
        backward: Computes gradients, then calls the strategy's micro-batch hook.
        step: Steps an optimizer, then calls `after_step`.
        after_step: Hooks of the strategy and of the recipe, called after each optimizer step.
        recipe: The recipe of FP8, if the precision is one.
        items: Counts items for summed losses (`num_items`).
        handlers: The kwargs handlers of `Accelerator`, and the plugins, by type.
        meter: Measures the training loop, with `log_system_metrics`.
        preemption: Saves and exits when the job is preempted, with `save_on_preemption`.
        guard: Refuses what needs states that are on the host.
    """

    runtime: Runtime
    gradient_state: GradientState
    strategy: Strategy
    engine: EngineCalls | None
    backward: Callable[..., None]
    step: Callable[..., bool | torch.Tensor]
    after_step: Sequence[Callable[[], None] | None]
    precision: PrecisionPolicy
    recipe: Recipe | None
    compiler: TorchDynamoPlugin
    synchronizer: Synchronizer
    items: ItemWindow
    handlers: dict[type, Any]
    prepared: PreparedObjects
    checkpoints: CheckpointContext
    trackers: TrackerSession
    meter: StepMeter | None
    preemption: Preemption | None
    guard: ExitStack | None = None


def merge_plugins(deepspeed_plugins: Any, plugins: Mapping[str, Any]) -> dict[str, Any]:
    """Return the plugins by argument name, with DeepSpeed's two arguments merged into one."""
    merged = {argument: plugins[argument] for argument in ENGINES}
    if deepspeed_plugins is None:
        return merged
    if merged["deepspeed_plugin"] is not None:
        raise SettingsError(
            f"Accelerator(deepspeed_plugin={merged['deepspeed_plugin']!r}, "
            f"deepspeed_plugins={deepspeed_plugins!r}): pass only one of the two."
        )
    return merged | {"deepspeed_plugin": deepspeed_plugins}


def hooks_after_step(
    strategy: Strategy, recipe: Recipe | None, prepared: PreparedObjects, preemption: Preemption | None
) -> tuple[Callable[[], None] | None, ...]:
    """Return what is called after each optimizer step."""
    hook = None if recipe is None else recipe.compute_scales
    return (
        strategy.after_step,
        hook and (lambda: hook(prepared.models)),
        preemption and preemption.count_optimizer_step,
    )


def use_recipe_handler(parts: Parts, handler: KwargsHandler | None) -> None:
    """Use the FP8 recipe of another handler for models prepared later.

    A run has one recipe, so the handler replaces any other. Without FP8, the handler is kept but not used.
    """
    added = index_handlers(() if handler is None else [handler])
    for kind in FP8_HANDLERS:
        parts.handlers.pop(kind, None)
    parts.handlers |= added
    if parts.recipe is None:
        return
    recipe = build_recipe("fp8", from_environ(environ.read()), parts.strategy)
    if recipe is None:
        return
    parts.recipe = parts.checkpoints.recipe = recipe
    parts.after_step = hooks_after_step(parts.strategy, recipe, parts.prepared, parts.preemption)
    parts.step = bind_step(parts.strategy, parts.after_step)


def start_preemption(
    checkpoints: CheckpointContext, save_state: Callable[[], Any], variables: Mapping[str, str]
) -> Preemption | None:
    """Install handlers for the preemption signals of job schedulers, if requested."""
    if not checkpoints.project.save_on_preemption:
        return None
    _ = checkpoints.numbered  # refuses a project without a directory
    is_restarted = variables.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
    preemption = checkpoint.preemption.Preemption(checkpoints.runtime, save_state, is_restarted=is_restarted)
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
    earlier: StrategySpec | None = AcceleratorState._shared_state.get("strategy")
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
    StepGuard,
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


def resolve_dataloading(dataloading: DataLoaderConfiguration | None, split: Any) -> DataLoaderConfiguration:
    """Return the data loader options; refuse a contradicting `split_batches`."""
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


def resolve_accumulation(
    steps: int,
    accumulation: GradientAccumulationPlugin | None,
    settings: Settings,
    plugins: Mapping[str, Any],
) -> GradientAccumulationPlugin:
    """Return the gradient accumulation plugin; `settings` are from the environment only, without plugins."""
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
    shared = AcceleratorState._shared_state
    before = dict(shared)
    try:
        yield
    except BaseException:
        shared.clear()
        shared.update(before)
        raise


def build_strategy(
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
    observer = observing.observer
    make = load(spec) if observer is None else partial(observer.build, spec)
    strategy = make(settings, runtime, precision, handlers)
    if ignores and strategy.precision is precision:
        logger.warning_once(
            "mixed_precision='fp16' on the CPU computes in float32, as with Accelerate; 'bf16' is "
            "faster if the CPU has instructions for it. Pass kwargs_handlers=[GradScalerKwargs()] to "
            "compute in float16."
        )
    if StepGuard in handlers:
        guard_steps(strategy, handlers[StepGuard])
    return strategy, strategy.precision
