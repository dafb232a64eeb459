"""The arguments of `Accelerator`, checked and put into the records that they stand for."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from accel_plugins.kwargs.amp import AutocastKwargs, GradScalerKwargs
from accel_plugins.kwargs.ddp import DistributedDataParallelKwargs
from accel_plugins.kwargs.dynamo import TorchDynamoPlugin
from accel_plugins.kwargs.profile import ProfileKwargs
from accel_plugins.kwargs.run import (
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
    InitProcessGroupKwargs,
    ProjectConfiguration,
)
from accel_plugins.plugin_specs import ENGINES
from accel_plugins.recipe import RECIPES
from accel_plugins.registry import STRATEGIES
from accel_plugins.strategy import StrategySpec
from accel_state.accelerator_state import AcceleratorState
from accel_state.errors import SettingsError
from accel_state.labels import RNGType
from accel_state.logging import get_logger
from accel_train.scheduler import check_clock

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Mapping, Sequence
    from pathlib import Path

    from accel_plugins.kwargs.base import KwargsHandler
    from accel_state.labels import DynamoBackend, PrecisionType
    from accel_state.settings import Settings
    from accel_trackers.session import OnTrackerError
    from accel_train.scheduler import StepPer

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
class Arguments:
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
    def of(cls, **arguments: Any) -> Arguments:
        """Sort the arguments of `Accelerator`: plugins by name, the two of DeepSpeed as one.

        Example:
            >>> Arguments.of(cpu=True, deepspeed_plugin=None, deepspeed_plugins={"zero3": 3}).plugins
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
        {<class 'accel_plugins.kwargs.amp.AutocastKwargs'>: AutocastKwargs(enabled=False, cache_enabled=None)}
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
    arguments: Arguments, settings: Settings, plugins: Mapping[str, Any]
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


def dataloader_configuration(arguments: Arguments) -> DataLoaderConfiguration:
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


def project_configuration(arguments: Arguments) -> ProjectConfiguration:
    """Return the project's directories."""
    config = arguments.project_config
    if config is None:
        return ProjectConfiguration(project_dir=arguments.project_dir)
    if arguments.project_dir is not None and config.project_dir is None:
        config.set_directories(arguments.project_dir)
    return config


def dynamo_plugin(arguments: Arguments) -> TorchDynamoPlugin:
    """Return how models are compiled."""
    backend, plugin = arguments.dynamo_backend, arguments.dynamo_plugin
    if plugin is None:
        return TorchDynamoPlugin(backend=backend)
    if backend is not None:
        raise SettingsError(
            f"Accelerator(dynamo_backend={backend!r}, dynamo_plugin={plugin!r}): give one of the two."
        )
    return plugin


def scheduler_clock(arguments: Arguments) -> StepPer | None:
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
