"""The table of strategies, the entry points that extend it, and the choice of one: pure, made once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel_plugins.strategy import StrategySpec
from accel_state.errors import SettingsError
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

    Example:
        >>> load("single").__name__
        'build'
    """
    spec = STRATEGIES.find(strategy) if isinstance(strategy, str) else strategy
    return STRATEGIES.resolve(spec.name, spec.build)


def choose(
    settings: Settings,
    topology: Topology,
    device: torch.device,
    specs: Mapping[str, StrategySpec] = BUILT_IN,
) -> str:
    """Name the strategy of a run, on all ranks alike: the selected one, else the first that applies."""
    selected = settings.training.strategy
    sequences = settings.parallelism and settings.parallelism.sp_size
    if selected is None and settings.deepspeed is None and (sequences or 1) > 1:
        raise SettingsError(
            f"ParallelismConfig(sp_size={sequences}): DeepSpeed's Ulysses shards sequences, and it is "
            "not in use: pass a deepspeed_plugin to Accelerator, or start the script with `accel launch "
            "--use_deepspeed`. Context parallelism (cp_size) does without."
        )
    fitting = next(name for name, spec in specs.items() if spec.applies(settings, topology, device))
    if selected is None or selected == fitting:
        return fitting
    _check_selected(settings, specs[selected], specs[fitting])
    limit = specs[selected].max_processes
    if limit is not None and topology.world_size > limit:
        raise SettingsError(
            f"strategy={selected!r} was selected in a job of {topology.world_size} processes, and trains at "
            f"most {limit}: select {fitting!r}, or start fewer."
        )
    return selected


def _check_selected(settings: Settings, selected: StrategySpec, fitting: StrategySpec) -> None:
    """Refuse a strategy that leaves unread what would have chosen another one."""
    for section in fitting.sections:
        value = getattr(settings, section)
        if value is None:
            continue
        about = (
            f"strategy={selected.name!r} was selected, but settings of {section!r}, from its plugin, the "
            f"environment or a config file, ask for {fitting.name!r}"
        )
        if section not in selected.sections:
            raise SettingsError(f"{about}: leave one of the two out.")
        for name, needed in (selected.sections[section] or {}).items():
            found = getattr(value, name)
            if found != needed:
                raise SettingsError(f"{about}: {name} is {found!r}, and {selected.name!r} needs {needed!r}.")
