"""Loaders that are not ours, whose batches ranks divide with one another."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accel_plugins.deepspeed.library import part

if TYPE_CHECKING:
    import torch


def adapted(loader: Any, full: Any, device: torch.device) -> Any:
    """DeepSpeed's adapter around a loader that gives every rank batches of its own.

    Args:
        loader: Yields dictionaries with `input_ids`, `position_ids` and `labels`.
        full: The mesh of all axes.
        device: Through which parts travel between ranks.
    """
    mesh = full["sp"]
    adapter = part("runtime.sequence_parallel.ulysses_sp").UlyssesSPDataLoaderAdapter
    return adapter(
        loader,
        sp_rank=mesh.get_local_rank(),
        sp_group=mesh.get_group(),
        sp_world_size=mesh.size(),
        device=device,
    )
