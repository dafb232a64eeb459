"""The tables of strategies and of plugins, and the choice of a run's strategy from its settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from accel_plugins.strategy import ForeignFiles, StrategyFactory, StrategySpec
from accel_state.errors import SettingsError
from accel_state.lazy import Registry

if TYPE_CHECKING:
    import torch

    from accel_state.remote import AnyPath
    from accel_state.settings.model import Settings
    from accel_state.topology import Topology

ENTRY_POINT_GROUP = "accel.strategies"
"""A distribution adds a strategy with `[project.entry-points."accel.strategies"] name = "module:SPEC"`."""


def _spec(name: str, build: str, sections: dict[str, Any] | None = None, **options: Any) -> StrategySpec:
    return StrategySpec(name=name, build=f"accel_plugins.{build}", sections=sections or {}, **options)


_FSDP2: dict[str, Any] = {"fsdp": {"fsdp_version": 2}, "parallelism": None}
_SHARDS = {"shards_gradients": True}
_CASTS = {"shards_gradients": True, "master_weights": True}

BUILT_IN: Mapping[str, StrategySpec] = {
    spec.name: spec
    for spec in (
        _spec(
            "torchft_fsdp2", "torchft.strategy:ShardedReplicaStrategy", {"replicas": None} | _FSDP2, **_CASTS
        ),
        _spec("torchft", "torchft.strategy:ReplicaStrategy", {"replicas": None}),
        _spec("xla_fsdp", "xla:SpmdStrategy", {"fsdp": {"xla": True, "xla_fsdp_v2": True}}),
        _spec("xla", "xla:XlaStrategy"),
        _spec(
            "deepspeed",
            "deepspeed.strategy:DeepSpeedStrategy",
            {"deepspeed": {}, "parallelism": None},
            files="accel_plugins.deepspeed.folder:FILES",
        ),
        _spec("megatron", "megatron.strategy:MegatronStrategy", {"megatron": {}}),
        _spec(
            "pipeline", "pipeline.strategy:PipelineStrategy", {"fsdp": None, "parallelism": None}, **_SHARDS
        ),
        _spec("fsdp1", "fsdp.fsdp1:Fsdp1Strategy", {"fsdp": {"fsdp_version": 1}}, **_CASTS),
        _spec("fsdp2", "fsdp.fsdp2:Fsdp2Strategy", _FSDP2, **_CASTS),
        _spec("tp", "parallelism.tensor:TensorParallelStrategy", {"parallelism": None}, **_SHARDS),
        _spec("ddp", "ddp:DdpStrategy"),
        _spec("single", "strategy:Strategy", max_processes=1),
    )
}
"""The strategies that come with accel."""

STRATEGIES = Registry(group=ENTRY_POINT_GROUP, kind=StrategySpec, noun="strategy", built_in=BUILT_IN)
"""All strategies, including those of installed distributions."""


def load(strategy: str | StrategySpec) -> StrategyFactory:
    """Import the class of a strategy.

    Example:
        >>> load("single").__name__
        'Strategy'
    """
    spec = STRATEGIES.find(strategy) if isinstance(strategy, str) else strategy
    return STRATEGIES.resolve(spec.name, spec.build)


def find_foreign(directory: AnyPath, name: str, index: int) -> tuple[AnyPath, Callable[[Path], Any]] | None:
    """Return the folder of a model that an engine has written, and its reader; see `ForeignFiles`."""
    for spec in STRATEGIES.available().values():
        if spec.files is not None:
            files: ForeignFiles = STRATEGIES.resolve(spec.name, spec.files)
            if (folder := files.find(directory, name, index)) is not None:
                return folder, files.read
    return None


def _fitting(settings: Settings, topology: Topology, device: torch.device) -> str:
    """Name the one of our strategies that settings ask for."""
    fsdp, axes, world = settings.fsdp, settings.parallelism, topology.world_size
    tensor = 1 if axes is None else axes.tp_size or 1
    sharding = () if axes is None else (axes.dp_shard_size, axes.cp_size, axes.sp_size, axes.ep_size)
    # FSDP averages the gradients of tensor-parallel layers.
    shards = fsdp is not None or 1 < tensor < world or any((size or 1) > 1 for size in sharding)
    asked = {
        "torchft_fsdp2": settings.replicas.groups > 1 and shards,
        "torchft": settings.replicas.groups > 1,
        "xla_fsdp": fsdp is not None and (bool(fsdp.xla) or device.type == "xla"),
        "xla": device.type == "xla",
        "deepspeed": settings.deepspeed is not None,
        "megatron": settings.megatron is not None,
        "pipeline": axes is not None and (axes.pp_size or 1) > 1,
        "fsdp1": fsdp is not None and fsdp.fsdp_version == 1 and axes is None,
        "fsdp2": shards,
        "tp": tensor > 1,
        "ddp": world > 1,
        "single": True,
    }
    return next(name for name, is_asked in asked.items() if is_asked)


def choose(
    settings: Settings, topology: Topology, device: torch.device, specs: Mapping[str, StrategySpec] = BUILT_IN
) -> str:
    """Name the strategy of a run, on all ranks alike: the selected one, else the first that applies.

    Strategies of installed distributions come before accel's own.
    """
    selected, fitting = settings.training.strategy, _fitting(settings, topology, device)
    for name, spec in specs.items():
        if spec.applies is not None and spec.applies(settings, topology, device):
            fitting = name
            break
    if selected is None or selected == fitting:
        return fitting
    for section in specs[fitting].sections:
        value = getattr(settings, section)
        if value is None:
            continue
        about = (
            f"strategy={selected!r} was selected, but settings of {section!r}, from its plugin, the "
            f"environment or a config file, ask for {fitting!r}"
        )
        if section not in specs[selected].sections:
            raise SettingsError(f"{about}: remove one of the two.")
        for name, needed in (specs[selected].sections[section] or {}).items():
            actual = getattr(value, name)
            if actual != needed:
                raise SettingsError(f"{about}: {name} is {actual!r}, and {selected!r} needs {needed!r}.")
    limit = specs[selected].max_processes
    if limit is not None and topology.world_size > limit:
        raise SettingsError(
            f"strategy={selected!r} was selected in a job of {topology.world_size} processes, and trains at "
            f"most {limit}: select {fitting!r}, or start fewer."
        )
    return selected


ENGINES: Mapping[str, tuple[str | None, str]] = {
    "deepspeed_plugin": ("deepspeed", "accel_plugins.deepspeed.plugin:DeepSpeedPlugin"),
    "fsdp_plugin": ("fsdp", "accel_plugins.fsdp.plugin:FullyShardedDataParallelPlugin"),
    "torch_tp_plugin": (None, "accel_plugins.parallelism.config:TorchTensorParallelPlugin"),
    "parallelism_config": ("parallelism", "accel_plugins.parallelism.config:ParallelismConfig"),
    "megatron_lm_plugin": ("megatron", "accel_plugins.megatron.plugin:MegatronLMPlugin"),
}
"""The plugins, by argument of `Accelerator`: the section of `Settings` that requests one, if any; the class.

In this order, each changes the settings from which the strategy is chosen, by its method
`to_settings(settings)`, which refuses contradictions.
"""


def _plugin_type(argument: str) -> type[Any]:
    return cast("type[Any]", EntryPoint(argument, ENGINES[argument][1], "accel.plugins").load())


def find_plugins(
    requested: Mapping[str, Any],
    known: Mapping[str, Any],
    settings: Settings,
    needed: Mapping[str, Mapping[str, Any] | None] | None = None,
) -> dict[str, Any]:
    """Resolve the plugins of a run: an argument wins over an earlier `Accelerator`, and that over settings.

    Args:
        requested: Values by argument of `Accelerator`; `None` if absent.
        known: Values of an earlier `Accelerator`, by argument.
        settings: The settings of the run.
        needed: Sections that need a plugin even if the settings have none, each with the plugin's arguments;
            `None` for sections that do not.

    Returns:
        Plugins by argument, in the order of `ENGINES`; those of DeepSpeed may be a dictionary of several.
    """
    plugins: dict[str, Any] = {}
    for argument, (section, _) in ENGINES.items():
        value = requested.get(argument)
        if value is None:
            value = known.get(argument)
        if value is None and section is not None:
            options = {} if getattr(settings, section) is not None else (needed or {}).get(section)
            value = None if options is None else _plugin_type(argument)(**options)
        if value is None:
            continue
        kind, several = _plugin_type(argument), argument == "deepspeed_plugin"
        values: list[Any] = [*value.values()] if several and isinstance(value, dict) else [value]
        if not values or not all(isinstance(plugin, kind) for plugin in values):
            more = f", or a dictionary of several by name, {kind.__name__}s" if several else ""
            raise SettingsError(f"Accelerator({argument}={value!r}): expected a {kind.__name__}{more}.")
        plugins[argument] = value
    return plugins


def with_plugin_fields(settings: Settings, plugins: Mapping[str, Any]) -> Settings:
    """Return settings updated with the fields of plugins, for choosing a strategy."""
    for value in plugins.values():
        first = next(iter(cast("Mapping[str, Any]", value).values())) if isinstance(value, dict) else value
        settings = first.to_settings(settings)
    return settings


def as_handlers(plugins: Mapping[str, Any]) -> dict[type, Any]:
    """Key plugins by type, as `build` of a strategy receives them; several of one type stay a dictionary."""
    return {_plugin_type(argument): plugin for argument, plugin in plugins.items()}
