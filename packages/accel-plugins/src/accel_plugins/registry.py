"""The table of strategies, and the entry points that extend it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel_plugins.strategy import StrategySpec
from accel_state.registry import Registry

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from importlib.metadata import EntryPoint

    import torch

    from accel_plugins.strategy import StrategyFactory
    from accel_state.settings.model import Settings
    from accel_state.topology import Topology

ENTRY_POINT_GROUP = "accel.strategies"
"""A distribution adds a strategy with `[project.entry-points."accel.strategies"] name = "module:SPEC"`."""


def _shards_by_compiler(settings: Settings, topology: Topology, device: torch.device) -> bool:
    return settings.fsdp is not None and (
        bool(settings.fsdp.xla) or _records_operations(settings, topology, device)
    )


def _records_operations(settings: Settings, topology: Topology, device: torch.device) -> bool:
    del settings, topology
    return device.type == "xla"


def _has_engine(settings: Settings, topology: Topology, device: torch.device) -> bool:
    del topology, device
    return settings.deepspeed is not None


def _has_megatron(settings: Settings, topology: Topology, device: torch.device) -> bool:
    del topology, device
    return settings.megatron is not None


def _shards_flat_parameters(settings: Settings, topology: Topology, device: torch.device) -> bool:
    del topology, device
    return settings.fsdp is not None and settings.fsdp.fsdp_version == 1 and settings.parallelism is None


def _shards_models(settings: Settings, topology: Topology, device: torch.device) -> bool:
    del device
    sizes = settings.parallelism
    if settings.fsdp is not None:
        return True
    if sizes is None:
        return False
    tensor = sizes.tp_size or 1
    copies = tensor > 1 and topology.world_size > tensor  # FSDP averages gradients of tensor-parallel layers
    return (sizes.dp_shard_size or 1) > 1 or (sizes.cp_size or 1) > 1 or copies


def _shards_layers(settings: Settings, topology: Topology, device: torch.device) -> bool:
    del topology, device
    return settings.parallelism is not None and (settings.parallelism.tp_size or 1) > 1


def _several_processes(settings: Settings, topology: Topology, device: torch.device) -> bool:
    del settings, device
    return topology.world_size > 1


def _always(settings: Settings, topology: Topology, device: torch.device) -> bool:
    del settings, topology, device
    return True


_STRATEGIES = "accel_plugins.strategies"

BUILT_IN: Mapping[str, StrategySpec] = {
    spec.name: spec
    for spec in (
        StrategySpec(
            name="xla_fsdp",
            applies=_shards_by_compiler,
            build=f"{_STRATEGIES}.xla_fsdp:build",
            sections={"fsdp": {"xla": True, "xla_fsdp_v2": True}},
        ),
        StrategySpec(name="xla", applies=_records_operations, build=f"{_STRATEGIES}.xla:build"),
        StrategySpec(
            name="deepspeed",
            applies=_has_engine,
            build=f"{_STRATEGIES}.deepspeed:build",
            sections={"deepspeed": {}, "parallelism": None},
        ),
        StrategySpec(
            name="megatron",
            applies=_has_megatron,
            build=f"{_STRATEGIES}.megatron:build",
            sections={"megatron": {}},
        ),
        StrategySpec(
            name="fsdp1",
            applies=_shards_flat_parameters,
            build=f"{_STRATEGIES}.fsdp1:build",
            sections={"fsdp": {"fsdp_version": 1}},
            shards_gradients=True,
            master_weights=True,
        ),
        StrategySpec(
            name="fsdp2",
            applies=_shards_models,
            build=f"{_STRATEGIES}.fsdp2:build",
            sections={"fsdp": {"fsdp_version": 2}, "parallelism": None},
            shards_gradients=True,
            master_weights=True,
        ),
        StrategySpec(
            name="tp",
            applies=_shards_layers,
            build=f"{_STRATEGIES}.tp:build",
            sections={"parallelism": None},
            shards_gradients=True,
        ),
        StrategySpec(name="ddp", applies=_several_processes, build=f"{_STRATEGIES}.ddp:build"),
        StrategySpec(name="single", applies=_always, build=f"{_STRATEGIES}.single:build", max_processes=1),
    )
}
"""The strategies that come with accel, in order: the first that applies is chosen."""


STRATEGIES = Registry(group=ENTRY_POINT_GROUP, kind=StrategySpec, noun="strategy", built_in=BUILT_IN)
"""All strategies, those of installed distributions included."""


def available(installed: Iterable[EntryPoint] | None = None) -> dict[str, StrategySpec]:
    """Return all strategies in the order of choice: those of installed distributions, then ours.

    Args:
        installed: The entry points to add; those of this environment when `None`.

    Raises:
        SettingsError: Two distributions claim one name, or one of ours; or what an entry point names is no
            `StrategySpec`.

    Example:
        >>> available([])["ddp"].build
        'accel_plugins.strategies.ddp:build'
    """
    return STRATEGIES.available(installed)


def find(name: str, *, source: str | None = None) -> StrategySpec:
    """Return what is known of a strategy.

    Args:
        name: A key of `available()`.
        source: Where the name was written, for the message.

    Raises:
        SettingsError: There is no such strategy.

    Example:
        >>> find("fsdp2").shards_gradients
        True
    """
    return STRATEGIES.find(name, source=source)


def load(strategy: str | StrategySpec) -> StrategyFactory:
    """Import the factory of a strategy.

    Args:
        strategy: A key of `available()`, or what that holds.

    Raises:
        SettingsError: There is no such strategy.

    Example:
        >>> load("single").__name__
        'build'
    """
    spec = find(strategy) if isinstance(strategy, str) else strategy
    return STRATEGIES.resolve(spec.name, spec.build)
