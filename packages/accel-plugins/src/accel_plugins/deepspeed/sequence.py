"""Sequence parallelism under DeepSpeed: the attention of `Ulysses`, and the groups of the engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import nn

from accel_plugins.deepspeed.library import ds_module
from accel_plugins.fsdp.plugin import FullyShardedDataParallelPlugin
from accel_plugins.parallelism.config import (
    DeepSpeedSequenceParallelConfig,
    ParallelismConfig,
    TorchTensorParallelPlugin,
)
from accel_plugins.parallelism.sequence import SequenceShard, Ulysses
from accel_state.errors import SettingsError
from accel_state.frozen import frozen
from accel_state.runtime import Runtime

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@frozen
class SequenceParallel:
    """The sequence parallelism of a run, with the options of DeepSpeed's."""

    full_mesh: DeviceMesh
    ulysses: Ulysses
    handler: DeepSpeedSequenceParallelConfig

    @property
    def size(self) -> int:
        """Sequence-parallel size."""
        return self.ulysses.size

    @property
    def shard(self) -> SequenceShard:
        """Sharding of batches to this rank."""
        fixed = not self.handler.sp_seq_length_is_variable
        return replace(self.ulysses.shard, length=self.handler.sp_seq_length if fixed else None)

    def as_mpu(self) -> SimpleNamespace:
        """Return DeepSpeed's "mpu": the process groups of a sequence, and of ZeRO's shards."""
        group, world = self.ulysses.group, dist.group.WORLD
        # DeepSpeed looks for the first method; its own mpu has the same group for model parallelism.
        methods: dict[str, Any] = {"initialize_sequence_parallel": lambda *_, **__: None}
        groups = {"sequence_parallel": group, "model_parallel": group, "sequence_data_parallel": world}
        for name, each in groups.items():
            methods |= {
                f"get_{name}_group": lambda each=each: each,
                f"get_{name}_world_size": lambda each=each: dist.get_world_size(each),
                f"get_{name}_rank": lambda each=each: dist.get_rank(each),
            }
        return SimpleNamespace(**methods)

    def validate(self, model: nn.Module) -> None:
        """Check that a model's attention can be computed over shards, and is the one of the options."""
        self.ulysses.validate(model)
        wanted = self.handler.sp_attn_implementation or "sdpa"
        used = getattr(getattr(model, "config", None), "_attn_implementation", wanted)
        if used != wanted:
            raise SettingsError(
                f"DeepSpeedSequenceParallelConfig(sp_attn_implementation={wanted!r}): "
                f"{type(model).__name__} computes attention with {used!r}; build it with "
                f"attn_implementation={wanted!r}, or set sp_attn_implementation={used!r}."
            )

    def release(self) -> None:
        """Restore the original attention of all models."""
        self.ulysses.release()
        ds_module("utils.groups").mpu = None


def sequences_of(runtime: Runtime, handlers: Mapping[type, Any]) -> SequenceParallel | None:
    """Return the sequence parallelism of a DeepSpeed run, if used."""
    for kind, name in (
        (FullyShardedDataParallelPlugin, "fsdp_plugin"),
        (TorchTensorParallelPlugin, "torch_tp_plugin"),
    ):
        if kind in handlers:
            raise SettingsError(
                f"Accelerator({name}={handlers[kind]!r}) cannot be combined with a DeepSpeedPlugin; "
                "remove one of the two."
            )
    config: ParallelismConfig | None = handlers.get(ParallelismConfig)
    if config is None:
        return None
    for axis, instead in (("tp", "FSDP2"), ("cp", "sp_size, or FSDP2"), ("ep", "FSDP2")):
        size: int = getattr(config, f"{axis}_size")
        if size > 1:
            raise SettingsError(
                f"ParallelismConfig({axis}_size={size}) cannot be combined with a "
                f"DeepSpeedPlugin; use {instead}."
            )
    if config.sp_enabled and config.sp_backend == "torch":
        raise SettingsError(
            f"ParallelismConfig(sp_size={config.sp_size}, sp_backend='torch') cannot be combined with a "
            "DeepSpeedPlugin. Remove sp_backend to use DeepSpeed's Ulysses, or train with FSDP2."
        )
    config.check_world(runtime.topology.world_size)
    full_mesh = config.get_device_mesh(runtime.device.type) if config.sp_enabled else None
    if full_mesh is None or config.sp_handler is None:
        return None
    ulysses = Ulysses(full_mesh["sp"], averages_losses=False)
    return SequenceParallel(full_mesh=full_mesh, ulysses=ulysses, handler=config.sp_handler)
