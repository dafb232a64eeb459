"""Which part of a full tensor this rank's shard is. Importing this imports `torch.distributed.tensor`."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from accel_state.torch_private import StridedShard, compute_local_shape_and_global_offset

Region = tuple[slice, ...]
"""Indices of a part of a tensor: a slice of each dim, with a start and a stop."""


def packed_dims(shard: DTensor) -> set[int]:
    """Return the dims along which a shard has several slices of the tensor, such as rows of packed weights.

    Its placement is strided along such a dim, without another shard of this dim that explains the stride.
    """
    placements: Any = shard.placements
    strided = {placement.dim for placement in placements if isinstance(placement, StridedShard)}
    return strided - {placement.dim for placement in placements if isinstance(placement, Shard)}


def region_of(shard: DTensor, without: Collection[int] = ()) -> Region:
    """Return the indices of this rank's shard in the full tensor, all of them along the dims in `without`."""
    placements: Any = [
        Replicate() if getattr(row, "dim", None) in without else row for row in shard.placements
    ]
    shape, offset = compute_local_shape_and_global_offset(shard.shape, shard.device_mesh, placements)
    return tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))


def rows_of(shard: DTensor, dim: int) -> Tensor:
    """Return the indices that a packed shard has along its packed dim; int64, on the device of the mesh."""
    numbers = torch.arange(shard.shape[dim], device=shard.device_mesh.device_type)
    numbers = numbers.view([-1 if index == dim else 1 for index in range(shard.dim())])
    placements: Any = [row if getattr(row, "dim", None) == dim else Replicate() for row in shard.placements]
    own: Any = distribute_tensor(numbers, shard.device_mesh, placements, src_data_rank=None)
    return own.to_local().flatten()


def regions_of(shard: DTensor) -> tuple[int, Sequence[Region]]:
    """Return the parts of the full tensor that are this rank's shard, and the dim along which they follow."""
    packed = packed_dims(shard)
    region = region_of(shard, packed)
    if not packed:
        return 0, [region]
    [dim] = packed
    rows = rows_of(shard, dim).cpu()
    starts = [0, *((rows.diff() != 1).nonzero().flatten() + 1).tolist(), len(rows)]
    runs = [rows[begin:end] for begin, end in itertools.pairwise(starts)]
    slices = [slice(int(run[0]), int(run[-1]) + 1) if len(run) else slice(0, 0) for run in runs]
    return dim, [(*region[:dim], part, *region[dim + 1 :]) for part in slices]
