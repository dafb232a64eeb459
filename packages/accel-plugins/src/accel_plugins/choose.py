"""The one decision: which strategy a run uses. Pure; made once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel_plugins.registry import BUILT_IN
from accel_state.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from accel_plugins.strategy import StrategySpec
    from accel_state.settings.model import Settings
    from accel_state.topology import Topology


def choose(
    settings: Settings,
    topology: Topology,
    device: torch.device,
    specs: Mapping[str, StrategySpec] = BUILT_IN,
) -> str:
    """Name the strategy of a run: the one that is selected, else the first that applies.

    Args:
        settings: What was asked for; `settings.training.strategy` selects.
        topology: Rank and world size.
        device: Device of this process.
        specs: The strategies to choose from, in order; as of `accel_plugins.registry.STRATEGIES.available`.

    Returns:
        A key of `specs`; the same on every rank.

    Raises:
        SettingsError: Sequences are to be divided by DeepSpeed, which is not used; or the strategy that is
            selected does not use what else was asked for.
    """
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
