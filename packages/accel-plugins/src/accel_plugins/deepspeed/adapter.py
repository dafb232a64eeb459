"""Adapt loaders that were not prepared: shard the sequences of their batches over ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accel_plugins.deepspeed.library import ds_module

if TYPE_CHECKING:
    import torch


def adapted(loader: Any, full: Any, device: torch.device) -> Any:
    """Wrap a loader, whose batches differ by rank, in DeepSpeed's Ulysses adapter.

    Args:
        loader: A loader of dictionaries with `input_ids`, `position_ids` and `labels`.
        full: The mesh of all axes.
        device: Device of the collectives.
    """
    mesh = full["sp"]
    adapter = ds_module("runtime.sequence_parallel.ulysses_sp").UlyssesSPDataLoaderAdapter
    return adapter(
        loader,
        sp_rank=mesh.get_local_rank(),
        sp_group=mesh.get_group(),
        sp_world_size=mesh.size(),
        device=device,
    )
