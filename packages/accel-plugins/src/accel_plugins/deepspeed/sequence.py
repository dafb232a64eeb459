"""Sequence parallelism under DeepSpeed: the mesh of a run, and the attention that its options name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from accel_plugins.fsdp.plugin import FullyShardedDataParallelPlugin
from accel_plugins.parallelism.config import (
    DeepSpeedSequenceParallelConfig,
    ParallelismConfig,
    TorchTensorParallelPlugin,
)
from accel_state.errors import SettingsError
from accel_state.runtime import Runtime

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def mesh_of(runtime: Runtime, handlers: Mapping[type, Any]) -> DeviceMesh | None:
    """Return the mesh of a DeepSpeed run, whose axis `sp` shards sequences; refuse all other axes."""
    config: ParallelismConfig | None = handlers.get(ParallelismConfig)
    fsdp, tensor = (
        handlers.get(kind) for kind in (FullyShardedDataParallelPlugin, TorchTensorParallelPlugin)
    )
    rows = [
        (f"Accelerator(fsdp_plugin={fsdp!r})", fsdp is not None, "remove one of the two"),
        (f"Accelerator(torch_tp_plugin={tensor!r})", tensor is not None, "remove one of the two"),
    ]
    if config is not None:
        for axis, instead in (("tp", "FSDP2"), ("cp", "sp_size, or FSDP2"), ("ep", "FSDP2")):
            size: int = getattr(config, f"{axis}_size")
            rows.append((f"ParallelismConfig({axis}_size={size})", size > 1, f"use {instead}"))
        other = config.sp_enabled and config.sp_backend == "torch"
        remedy = "remove sp_backend for DeepSpeed's Ulysses, or train with FSDP2"
        rows.append(("ParallelismConfig(sp_backend='torch')", other, remedy))
    for setting, is_set, remedy in rows:
        if is_set:
            raise SettingsError(f"{setting} cannot be combined with a DeepSpeedPlugin; {remedy}.")
    if config is None:
        return None
    config.check_world(runtime.topology.world_size)
    return config.get_device_mesh(runtime.device.type) if config.sp_enabled else None


def check_attention(model: nn.Module, options: DeepSpeedSequenceParallelConfig) -> None:
    """Refuse a model that computes another attention than the options name."""
    wanted = options.sp_attn_implementation or "sdpa"
    used = getattr(getattr(model, "config", None), "_attn_implementation", wanted)
    if used != wanted:
        raise SettingsError(
            f"DeepSpeedSequenceParallelConfig(sp_attn_implementation={wanted!r}): {type(model).__name__} "
            f"computes attention with {used!r}; build it with attn_implementation={wanted!r}, or set "
            f"sp_attn_implementation={used!r}."
        )
