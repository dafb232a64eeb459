"""The device mesh of a run, and its submeshes by use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.distributed.device_mesh import DeviceMesh

from accel_plugins.parallelism.config import AXES, ParallelismConfig, flatten_mesh, mesh_of
from accel_plugins.parallelism.handlers import TorchTensorParallelPlugin
from accel_plugins.strategy import BatchSharding
from accel_state import group_end
from accel_state.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from accel_state.runtime import Runtime


@dataclass(frozen=True, slots=True, kw_only=True)
class Axes:
    """The device mesh of a run."""

    config: ParallelismConfig
    mesh: DeviceMesh
    sharding: BatchSharding

    @property
    def tensor(self) -> DeviceMesh | None:
        """Mesh of tensor parallelism, if any."""
        return self.mesh["tp"] if self.config.tp_enabled else None

    @property
    def context(self) -> DeviceMesh | None:
        """Mesh of context parallelism, if any."""
        return self.mesh["cp"] if self.config.cp_enabled else None

    def fully_sharded(self, runtime: Runtime) -> DeviceMesh:
        """Return the mesh of FSDP2: a shard axis, after a replicate axis if there are replicas."""
        names: Any = self.mesh.mesh_dim_names
        shards = [name for name in ("dp_shard", "cp") if name in names]
        if not shards:  # replicas only: each is one shard
            replicas = self.config.sizes["dp_replicate"]
            return mesh_of(runtime.device.type, {"dp_replicate": replicas, "dp_shard": 1})
        if len(shards) == 1:
            wanted = ["dp_replicate", *shards] if self.config.dp_replicate_enabled else shards
            return self.mesh[tuple(wanted)]
        flat = flatten_mesh(self.mesh[tuple(shards)], "dp_shard_cp")
        if not self.config.dp_replicate_enabled:
            return flat
        return DeviceMesh._concatenate([self.mesh["dp_replicate"], flat])  # pyright: ignore[reportPrivateUsage] - no other way


def axes_of(runtime: Runtime, handlers: Mapping[type, Any], *, sharded: bool) -> Axes:
    """Build the mesh of a run."""
    world = runtime.topology.world_size
    group_end.join_alone(runtime.kind.group_backend, runtime.device)  # a mesh needs a group
    config = _config(handlers, world, sharded=sharded)
    config.check_world(world)
    mesh = config.get_device_mesh(runtime.device.type)
    if mesh is None:  # one process
        mesh = mesh_of(runtime.device.type, {"dp_shard": 1})
    shared = config.non_data_parallel_size
    tensor_rank = runtime.topology.rank % config.sizes["tp"]
    return Axes(
        config=config,
        mesh=mesh,
        sharding=BatchSharding(
            num_shards=config.data_parallel_size,
            shard_index=runtime.topology.rank // shared,
            repeats=tensor_rank != 0,
        ),
    )


def _config(handlers: Mapping[type, Any], world: int, *, sharded: bool) -> ParallelismConfig:
    config: ParallelismConfig | None = handlers.get(ParallelismConfig)
    plugin: TorchTensorParallelPlugin | None = handlers.get(TorchTensorParallelPlugin)
    if config is not None:
        if plugin is not None and (plugin.torch_device_mesh or plugin.tp_size != config.sizes["tp"]):
            raise SettingsError(
                f"torch_tp_plugin={plugin!r} contradicts parallelism_config={config!r}; give one of the two."
            )
        return config
    if plugin is not None and plugin.torch_device_mesh is not None:
        return _of_mesh(plugin.torch_device_mesh)
    tensor = 1 if plugin is None else plugin.tp_size
    if world % tensor:
        raise SettingsError(
            f"TorchTensorParallelPlugin(tp_size={tensor}): the world size {world} is not a multiple of "
            f"{tensor}; launch a multiple of {tensor} processes, or choose another tp_size."
        )
    rest: dict[str, Any] = {("dp_shard_size" if sharded else "dp_replicate_size"): world // tensor}
    return ParallelismConfig(tp_size=tensor, **rest)


def _of_mesh(mesh: DeviceMesh) -> ParallelismConfig:
    names, ranks = [*(mesh.mesh_dim_names or ())], mesh.mesh.flatten().tolist()
    if names != [axis for axis in AXES if axis in names] or ranks != [*range(len(ranks))]:
        raise SettingsError(
            f"TorchTensorParallelPlugin(torch_device_mesh={mesh!r}): expected axes named {[*AXES]}, in this "
            "order, with the ranks in ascending order."
        )
    sizes: dict[str, Any] = {f"{axis}_size": 1 for axis in AXES}
    sizes |= {f"{name}_size": size for name, size in zip(names, mesh.shape, strict=True)}
    config = ParallelismConfig(**sizes)
    config.device_mesh = mesh
    return config
