"""The tables of strategies and of plugins, and the choice of a run's strategy from its settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from accel_plugins.strategy import ForeignFiles, StrategyFactory, StrategySpec
from accel_state.errors import SettingsError
from accel_state.frozen import frozen
from accel_state.lazy import Registry

if TYPE_CHECKING:
    import torch

    from accel_state.remote import AnyPath
    from accel_state.settings.model import Settings
    from accel_state.topology import Topology

ENTRY_POINT_GROUP = "accel.strategies"
"""A distribution adds a strategy with `[project.entry-points."accel.strategies"] name = "module:SPEC"`."""


def _shards_models(settings: Settings, topology: Topology, device: torch.device) -> bool:
    del device
    sizes = settings.parallelism
    if settings.fsdp is not None:
        return True
    if sizes is None:
        return False
    tensor = sizes.tp_size or 1
    copies = tensor > 1 and topology.world_size > tensor  # FSDP averages gradients of tensor-parallel layers
    axes = (sizes.dp_shard_size, sizes.cp_size, sizes.sp_size, sizes.ep_size)
    return copies or any((size or 1) > 1 for size in axes)


BUILT_IN: Mapping[str, StrategySpec] = {
    spec.name: spec
    for spec in (
        StrategySpec(
            name="torchft_fsdp2",
            applies=lambda settings, topology, device: (
                settings.replicas.groups > 1 and _shards_models(settings, topology, device)
            ),
            build="accel_plugins.torchft.strategy:ShardedReplicaStrategy",
            sections={"replicas": None, "fsdp": {"fsdp_version": 2}, "parallelism": None},
            shards_gradients=True,
            master_weights=True,
        ),
        StrategySpec(
            name="torchft",
            applies=lambda settings, *_: settings.replicas.groups > 1,
            build="accel_plugins.torchft.strategy:ReplicaStrategy",
            sections={"replicas": None},
        ),
        StrategySpec(
            name="xla_fsdp",
            applies=lambda settings, _, device: (
                settings.fsdp is not None and (bool(settings.fsdp.xla) or device.type == "xla")
            ),
            build="accel_plugins.xla:SpmdStrategy",
            sections={"fsdp": {"xla": True, "xla_fsdp_v2": True}},
        ),
        StrategySpec(
            name="xla",
            applies=lambda _, __, device: device.type == "xla",
            build="accel_plugins.xla:XlaStrategy",
        ),
        StrategySpec(
            name="deepspeed",
            applies=lambda settings, *_: settings.deepspeed is not None,
            build="accel_plugins.deepspeed.strategy:DeepSpeedStrategy",
            files="accel_plugins.deepspeed.folder:FILES",
            sections={"deepspeed": {}, "parallelism": None},
        ),
        StrategySpec(
            name="megatron",
            applies=lambda settings, *_: settings.megatron is not None,
            build="accel_plugins.megatron.strategy:MegatronStrategy",
            sections={"megatron": {}},
        ),
        StrategySpec(
            name="pipeline",
            applies=lambda settings, *_: (
                settings.parallelism is not None and (settings.parallelism.pp_size or 1) > 1
            ),
            build="accel_plugins.pipeline.strategy:PipelineStrategy",
            sections={"fsdp": None, "parallelism": None},
            shards_gradients=True,
        ),
        StrategySpec(
            name="fsdp1",
            applies=lambda settings, *_: (
                settings.fsdp is not None and settings.fsdp.fsdp_version == 1 and settings.parallelism is None
            ),
            build="accel_plugins.fsdp.fsdp1:Fsdp1Strategy",
            sections={"fsdp": {"fsdp_version": 1}},
            shards_gradients=True,
            master_weights=True,
        ),
        StrategySpec(
            name="fsdp2",
            applies=_shards_models,
            build="accel_plugins.fsdp.fsdp2:Fsdp2Strategy",
            sections={"fsdp": {"fsdp_version": 2}, "parallelism": None},
            shards_gradients=True,
            master_weights=True,
        ),
        StrategySpec(
            name="tp",
            applies=lambda settings, *_: (
                settings.parallelism is not None and (settings.parallelism.tp_size or 1) > 1
            ),
            build="accel_plugins.parallelism.tensor:TensorParallelStrategy",
            sections={"parallelism": None},
            shards_gradients=True,
        ),
        StrategySpec(
            name="ddp",
            applies=lambda _, topology, __: topology.world_size > 1,
            build="accel_plugins.ddp:DdpStrategy",
        ),
        StrategySpec(
            name="single",
            applies=lambda *_: True,
            build="accel_plugins.single:SingleStrategy",
            max_processes=1,
        ),
    )
}
"""The strategies that come with accel, in order: the first that applies is chosen."""

STRATEGIES = Registry(group=ENTRY_POINT_GROUP, kind=StrategySpec, noun="strategy", built_in=BUILT_IN)
"""All strategies, including those of installed distributions."""


def load(strategy: str | StrategySpec) -> StrategyFactory:
    """Import the class of a strategy.

    Example:
        >>> load("single").__name__
        'SingleStrategy'
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


def choose(
    settings: Settings, topology: Topology, device: torch.device, specs: Mapping[str, StrategySpec] = BUILT_IN
) -> str:
    """Name the strategy of a run, on all ranks alike: the selected one, else the first that applies."""
    selected = settings.training.strategy
    fitting = next(name for name, spec in specs.items() if spec.applies(settings, topology, device))
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


@frozen
class Engine:
    """A plugin that `Accelerator` accepts.

    Its class has a method `to_settings(settings)`, which returns settings with those fields of the plugin
    that `choose` reads, and refuses contradictions.

    Args:
        section: The field of `Settings` that, if it is not `None`, requests a plugin created without
            arguments.
        several: Whether the argument may also be a dictionary of plugins by name.
    """

    argument: str
    section: str | None
    plugin: str
    several: bool = False

    def plugin_type(self) -> type[Any]:
        """Import the plugin class."""
        return cast("type[Any]", EntryPoint(self.argument, self.plugin, "accel.plugins").load())


ENGINES: tuple[Engine, ...] = tuple(
    Engine(argument=argument, section=section, plugin=plugin, several=section == "deepspeed")
    for argument, section, plugin in (
        ("deepspeed_plugin", "deepspeed", "accel_plugins.deepspeed.plugin:DeepSpeedPlugin"),
        ("fsdp_plugin", "fsdp", "accel_plugins.fsdp.plugin:FullyShardedDataParallelPlugin"),
        ("torch_tp_plugin", None, "accel_plugins.parallelism.config:TorchTensorParallelPlugin"),
        ("parallelism_config", "parallelism", "accel_plugins.parallelism.config:ParallelismConfig"),
        ("megatron_lm_plugin", "megatron", "accel_plugins.megatron.plugin:MegatronLMPlugin"),
    )
)
"""All plugins. In this order, each changes the settings from which the strategy is chosen."""


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
        Plugins by argument, or by argument and name if there may be `several`; in the order of `ENGINES`.
    """
    plugins: dict[str, Any] = {}
    for engine in ENGINES:
        value = requested.get(engine.argument)
        if value is None:
            value = known.get(engine.argument)
        if value is None and engine.section is not None:
            arguments = (needed or {}).get(engine.section)
            if getattr(settings, engine.section) is not None:
                value = engine.plugin_type()()
            elif arguments is not None:
                value = engine.plugin_type()(**arguments)
        if value is None:
            continue
        kind, is_several = engine.plugin_type(), engine.several and isinstance(value, dict)
        values: list[Any] = [*value.values()] if is_several else [value]
        if not values or any(not isinstance(plugin, kind) for plugin in values):
            more = f", or a dictionary of several by name, {kind.__name__}s" if engine.several else ""
            raise SettingsError(
                f"Accelerator({engine.argument}={value!r}): expected a {kind.__name__}{more}."
            )
        plugins[engine.argument] = value
    return plugins


def with_plugin_fields(settings: Settings, plugins: Mapping[str, Any]) -> Settings:
    """Return settings updated with the fields of plugins, for choosing a strategy."""
    for value in plugins.values():
        first = next(iter(cast("Mapping[str, Any]", value).values())) if isinstance(value, dict) else value
        settings = first.to_settings(settings)
    return settings


def as_handlers(plugins: Mapping[str, Any]) -> dict[type, Any]:
    """Key plugins by type, as `build` of a strategy receives them; several of one type stay a dictionary."""
    return {
        engine.plugin_type(): plugins[engine.argument] for engine in ENGINES if engine.argument in plugins
    }
