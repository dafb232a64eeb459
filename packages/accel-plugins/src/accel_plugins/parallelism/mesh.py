"""Cache of device meshes: torch never destroys a mesh's process groups, so equal meshes are shared."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

if TYPE_CHECKING:
    from collections.abc import Mapping

_made: dict[tuple[str, tuple[tuple[str, int], ...]], DeviceMesh] = {}


def mesh_of(device_type: str, sizes: Mapping[str, int]) -> DeviceMesh:
    """Return the mesh of all ranks with the given axes. A collective over all ranks.

    Returns:
        The mesh; the same one for equal arguments, until its process group is destroyed.
    """
    key = (device_type, tuple(sizes.items()))
    known = _made.get(key)
    if known is None or not _is_alive(known):
        known = _made[key] = init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    return known


def _is_alive(mesh: DeviceMesh) -> bool:
    living = c10d._world.pg_map  # pyright: ignore[reportPrivateUsage] - no public list
    try:
        return all(group in living for group in mesh.get_all_groups())
    except (RuntimeError, ValueError):  # a group's name is no longer registered
        return False
