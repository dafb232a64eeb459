"""The strategy of models that are sharded before `prepare`, as by `from_pretrained(distributed_config=…)`.

Parameters that are `DTensor`s stay on their meshes: nothing is wrapped. Ranks along the axes of `fully_shard`
read different batches, those along all other axes (tensor and expert parallelism) the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from accel_ops.modules import size_at_load, without_compiler
from accel_plugins.fsdp.fsdp2 import MonitoredAllGather
from accel_plugins.fsdp.plugin import FullyShardedDataParallelPlugin
from accel_plugins.parallelism.config import ParallelismConfig, TorchTensorParallelPlugin, mesh_of
from accel_plugins.sharding.shards import ShardedStates
from accel_plugins.sharding.state import StateForm
from accel_plugins.sharding.wrap import ShardedStrategy
from accel_plugins.strategy import BatchSharding, Bundle, PrecisionPolicy
from accel_plugins.unsharded import check_not_lazy, move_to_device
from accel_state.errors import SettingsError
from accel_state.runtime import Runtime
from accel_state.settings.model import Settings


class PreshardedStrategy(ShardedStrategy):
    """Leaves sharded models unchanged; `handlers` must not contradict them.

    Built from the first model, which has `DTensor`s among its parameters, by a collective over all ranks.
    """

    name = "presharded"

    def __init__(
        self,
        model: nn.Module,
        runtime: Runtime,
        precision: PrecisionPolicy,
        handlers: Mapping[type, Any],
    ) -> None:
        super().__init__(Settings(), runtime, precision, handlers)
        rank, world = runtime.topology.rank, runtime.topology.world_size
        self._data_mesh = mesh = data_mesh(model)
        self.fsdp_version = None if mesh is None else 2
        self.states = ShardedStates(runtime.device, lambda: StateForm.SHARDED)
        # 1. Find this rank's shard of batches, in the order of FSDP2's mesh, and those of all ranks.
        if mesh is None:
            meshes = {p.device_mesh for p in model.parameters() if isinstance(p, DTensor)}
            covered = max(own.size() for own in meshes)
            if covered != world:
                raise SettingsError(
                    f"{type(model).__qualname__} is sharded already, over {covered} of {world} ranks, and "
                    "not by fully_shard: nothing would average the gradients of its copies. Load it with a "
                    "replicate axis (dp_replicate_size of DistributedConfig), or call fully_shard before "
                    "prepare()."
                )
        shards = 1 if mesh is None else mesh.size()
        shard = 0 if mesh is None else [*mesh.mesh.flatten().tolist()].index(rank)
        indices = runtime.collectives.all_gather_object(shard)
        self.sharding = BatchSharding(num_shards=shards, shard_index=shard, repeats=shard in indices[:rank])
        _check_plugins(model, handlers, num_shards=shards, world_size=world)
        # 2. Name the axes of all ranks as `ParallelismConfig` does; along "tp", ranks read the same batches.
        copies = 1 if mesh is None else math.prod(mesh.shape[:-1])
        sizes = {"dp_replicate": copies, "dp_shard": shards // copies, "tp": world // shards}
        sizes = {axis: size for axis, size in sizes.items() if size > 1} or {"dp_shard": 1}
        ranks, kind = sorted(range(world), key=indices.__getitem__), runtime.device.type
        if ranks == [*range(world)]:
            self.mesh = mesh_of(kind, sizes)
        else:
            table = torch.tensor(ranks, device="cpu").view(*sizes.values())
            self.mesh = DeviceMesh(kind, table, mesh_dim_names=tuple(sizes))

    def check(self, bundle: Bundle) -> None:
        """Refuse a model that is not sharded, or is sharded over other axes than the first model."""
        expected = 1 if self._data_mesh is None else self._data_mesh.size()
        for model in map(without_compiler, bundle.models):
            check_not_lazy(model)
            mesh = data_mesh(model)
            shards = 1 if mesh is None else mesh.size()
            if shards != expected or not any(isinstance(p, DTensor) for p in model.parameters()):
                raise SettingsError(
                    f"{type(model).__qualname__} has batches for {shards} ranks, but the first prepared "
                    f"model is already sharded, with batches for {expected}: all models of an "
                    "Accelerator must have the same sharding."
                )

    def wrap(self, bundle: Bundle, *, evaluation: bool = False, **_: Any) -> Bundle:
        """Monitor FSDP2's collectives, and synchronise trainable parameters that it does not manage."""
        if evaluation:
            return replace(bundle, models=move_to_device(bundle, self.runtime.device))
        mesh = self._data_mesh
        if mesh is None:
            return bundle
        groups = mesh.get_all_groups()

        def average(parameter: Tensor) -> None:
            if parameter.grad is not None:
                for group in groups:
                    dist.all_reduce(parameter.grad, group=group)
                parameter.grad /= mesh.size()

        for model in map(without_compiler, bundle.models):
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.set_custom_all_gather(MonitoredAllGather())
            for parameter in model.parameters():
                if parameter.requires_grad and not isinstance(parameter, DTensor):  # such as an adapter
                    dist.broadcast(parameter.detach(), src=0)
                    parameter.register_post_accumulate_grad_hook(average)
        return bundle


def data_mesh(model: nn.Module) -> DeviceMesh | None:
    """Return the mesh over which FSDP2 shards and replicates a model, `None` if it does not.

    Experts may have another mesh; the outermost module with parameters decides.
    """
    for module in without_compiler(model).modules():
        if isinstance(module, FSDPModule):
            state: Any = module._get_fsdp_state()
            # torch 2.9 has one parameter group per module, later versions a list.
            groups: Any = getattr(state, "_fsdp_param_groups", None) or [
                getattr(state, "_fsdp_param_group", None)
            ]
            if groups[0] is not None:
                return groups[0].mesh_info.mesh
    return None


def _check_plugins(
    model: nn.Module, handlers: Mapping[type, Any], *, num_shards: int, world_size: int
) -> None:
    """Refuse plugins that request another sharding than the model's."""
    name = type(model).__qualname__
    if FullyShardedDataParallelPlugin in handlers:
        raise SettingsError(
            f"{name} is sharded already, as by from_pretrained(distributed_config=...), and "
            f"{handlers[FullyShardedDataParallelPlugin]!r} would shard it again. Remove the plugin (and "
            "--use_fsdp), or load the model without these arguments."
        )
    actual = {"data": num_shards, "tp": world_size // num_shards, "ep": size_at_load(model, "ep_size") or 1}
    config: ParallelismConfig | None = handlers.get(ParallelismConfig)
    plugin: TorchTensorParallelPlugin | None = handlers.get(TorchTensorParallelPlugin)
    wanted: dict[str, Any] = {}
    if config is not None and config.total_size > 1:
        wanted |= {"data": config.data_parallel_size, "tp": config.sizes["tp"]}
    if config is not None and config.ep_enabled:
        wanted["ep"] = config.ep_size
    if plugin is not None:
        wanted["tp"] = plugin.tp_size
    if any(actual[axis] != size for axis, size in wanted.items()):
        raise SettingsError(
            f"{name} is sharded already so that {actual['data']} ranks read different batches and "
            f"{actual['tp']} the same, its experts over {actual['ep']} ranks, and {config or plugin!r} "
            "contradicts this. Remove it, or give both the same sizes."
        )
