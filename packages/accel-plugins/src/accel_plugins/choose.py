"""The one decision: which strategy a run uses. Pure; made once."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from accel_state.settings.model import Settings
    from accel_state.topology import Topology

_Applies: TypeAlias = "Callable[[Settings, Topology, torch.device], bool]"


def _several_processes(settings: Settings, topology: Topology, device: torch.device) -> bool:
    del settings, device
    return topology.world_size > 1


def _always(settings: Settings, topology: Topology, device: torch.device) -> bool:
    del settings, topology, device
    return True


# In order: the first row that applies is chosen.
_RULES: tuple[tuple[str, _Applies], ...] = (("ddp", _several_processes), ("single", _always))


def choose(settings: Settings, topology: Topology, device: torch.device) -> str:
    """Name the strategy of a run.

    Args:
        settings: What was asked for.
        topology: Which process this is among how many.
        device: Where this process computes.

    Returns:
        A key of `accel_plugins.registry.available()`; the same on every rank.
    """
    return next(name for name, applies in _RULES if applies(settings, topology, device))
