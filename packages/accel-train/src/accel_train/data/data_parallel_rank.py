"""Which ranks read different batches: one per data-parallel coordinate of the device mesh."""

from __future__ import annotations

import math
from typing import Any

SHARED_AXES = frozenset({"tp", "cp", "sp", "pp"})
"""The axes along which all ranks have the same batches."""


def shard_of_ranks(mesh: Any) -> list[int]:
    """Which shard of the data every rank of a mesh gets.

    Args:
        mesh: A `DeviceMesh` of all ranks, whose axes have names. Along the `SHARED_AXES` batches are the
            same.

    Example:
        >>> from types import SimpleNamespace
        >>> import torch
        >>> ranks = torch.arange(4).reshape(2, 2)
        >>> shard_of_ranks(SimpleNamespace(mesh=ranks, mesh_dim_names=("dp_shard", "tp")))
        [0, 0, 1, 1]
    """
    names = mesh.mesh_dim_names
    if names is None:
        raise ValueError(
            f"torch_device_mesh={mesh!r} has no mesh_dim_names, which say what its axes are for."
        )
    sharded_axes = [axis for axis, name in enumerate(names) if name not in SHARED_AXES]
    shared = [axis for axis, name in enumerate(names) if name in SHARED_AXES]
    groups = mesh.mesh.permute(*sharded_axes, *shared)
    rows = groups.reshape(math.prod(groups.shape[: len(sharded_axes)]), -1).tolist()
    owners = {rank: shard for shard, ranks in enumerate(rows) for rank in ranks}
    return [owners[rank] for rank in range(len(owners))]
