"""The table of strategies, and the entry points that extend it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel_plugins.strategy import StrategySpec
from accel_state.registry import Registry

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from accel_plugins.strategy import StrategyFactory
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
    return (sizes.dp_shard_size or 1) > 1 or (sizes.cp_size or 1) > 1 or copies


_STRATEGIES = "accel_plugins.strategies"

BUILT_IN: Mapping[str, StrategySpec] = {
    spec.name: spec
    for spec in (
        StrategySpec(
            name="xla_fsdp",
            applies=lambda settings, _, device: (
                settings.fsdp is not None and (bool(settings.fsdp.xla) or device.type == "xla")
            ),
            build=f"{_STRATEGIES}.xla_fsdp:build",
            sections={"fsdp": {"xla": True, "xla_fsdp_v2": True}},
        ),
        StrategySpec(
            name="xla", applies=lambda _, __, device: device.type == "xla", build=f"{_STRATEGIES}.xla:build"
        ),
        StrategySpec(
            name="deepspeed",
            applies=lambda settings, *_: settings.deepspeed is not None,
            build=f"{_STRATEGIES}.deepspeed:build",
            sections={"deepspeed": {}, "parallelism": None},
        ),
        StrategySpec(
            name="megatron",
            applies=lambda settings, *_: settings.megatron is not None,
            build=f"{_STRATEGIES}.megatron:build",
            sections={"megatron": {}},
        ),
        StrategySpec(
            name="fsdp1",
            applies=lambda settings, *_: (
                settings.fsdp is not None and settings.fsdp.fsdp_version == 1 and settings.parallelism is None
            ),
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
            applies=lambda settings, *_: (
                settings.parallelism is not None and (settings.parallelism.tp_size or 1) > 1
            ),
            build=f"{_STRATEGIES}.tp:build",
            sections={"parallelism": None},
            shards_gradients=True,
        ),
        StrategySpec(
            name="ddp",
            applies=lambda _, topology, __: topology.world_size > 1,
            build=f"{_STRATEGIES}.ddp:build",
        ),
        StrategySpec(
            name="single", applies=lambda *_: True, build=f"{_STRATEGIES}.single:build", max_processes=1
        ),
    )
}
"""The strategies that come with accel, in order: the first that applies is chosen."""


STRATEGIES = Registry(group=ENTRY_POINT_GROUP, kind=StrategySpec, noun="strategy", built_in=BUILT_IN)
"""All strategies, those of installed distributions included."""


def load(strategy: str | StrategySpec) -> StrategyFactory:
    """Import the factory of a strategy.

    Raises:
        SettingsError: There is no such strategy.

    Example:
        >>> load("single").__name__
        'build'
    """
    spec = STRATEGIES.find(strategy) if isinstance(strategy, str) else strategy
    return STRATEGIES.resolve(spec.name, spec.build)
