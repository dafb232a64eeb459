"""Orthogonalise sharded matrices: one rank gathers each matrix and scatters the result."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from accel_plugins.sharding.shards import is_packed, shard_like, with_local
from accel_state import hang_monitor
from accel_state.frozen import frozen
from accel_state.torch_private import compute_shape_and_offset_at

Read: TypeAlias = "Callable[[int, Any], Tensor]"
"""Returns the update of a part of this rank's shard, by the indices of tensor and part."""
Write: TypeAlias = "Callable[[int, Any, Tensor], None]"
"""Receives the orthogonalised update of such a part."""
Orthogonalize: TypeAlias = "Callable[[Tensor], Tensor]"
"""Orthogonalises a full matrix."""


@frozen
class ShardLayout:
    """The regions of a tensor's shards, by rank of a process group.

    Args:
        group: The ranks of the tensor's mesh.
        regions: The first and the last index (exclusive) along each dim, by rank of the group.
        sources: The first rank of each region, without its replicas.
    """

    group: Any
    regions: Sequence[Sequence[tuple[int, int]]]
    sources: frozenset[int]

    @classmethod
    def of(cls, tensor: DTensor) -> ShardLayout:
        """Return the layout of a tensor; all ranks of its mesh call it, in the same order."""
        mesh = tensor.device_mesh
        group: Any = mesh.get_group() if mesh.ndim == 1 else None  # the default one, that of all ranks
        if mesh.ndim > 1 and mesh.size() < dist.get_world_size():
            group = mesh._flatten("_".join(mesh.mesh_dim_names or ())).get_group()
        ranks: list[int] = mesh.mesh.flatten().tolist()
        regions: list[Any] = [()] * len(ranks)
        for rank, coordinates in zip(ranks, itertools.product(*map(range, mesh.shape)), strict=True):
            shape, offset = compute_shape_and_offset_at(
                tensor.shape, tuple(mesh.shape), [*coordinates], tensor.placements
            )
            at = rank if group is None else dist.get_group_rank(group, rank)
            regions[at] = tuple(
                (start, start + size) if size else (0, 0) for start, size in zip(offset, shape, strict=True)
            )
        first: dict[Any, int] = {}
        for at, region in enumerate(regions):
            first.setdefault(region, at)
        return cls(group=group, regions=regions, sources=frozenset(first.values()))

    def has_full_matrices(self, shape: torch.Size) -> bool:
        """Return whether every rank has full matrices: the last two dims are not sharded."""
        full = [(0, size) for size in shape[-2:]]
        return all([*region[-2:]] == full or _is_empty(region) for region in self.regions)


def _is_empty(region: Sequence[tuple[int, int]]) -> bool:
    return any(start == end for start, end in region)


def orthogonalize_sharded(
    parameters: Sequence[DTensor],
    layouts: dict[Any, ShardLayout],
    *,
    read: Read,
    orthogonalize: Orthogonalize,
    write: Write,
) -> None:
    """Orthogonalise the updates of matrices that are sharded over one mesh; a collective over its ranks.

    A matrix that some rank has in full stays there. Of the others every rank gathers one at a time, and
    scatters the result: besides its shards it needs memory for two matrices in bfloat16. Each of these is
    orthogonalised by one rank only, also for replicas. A parameter of three dims has several matrices.
    `layouts` caches layouts.
    """
    shared: list[_Matrix] = []
    for index, parameter in enumerate(parameters):
        if is_packed(parameter):
            # Shards have several slices: every rank gathers all, and keeps its shard of the result.
            update = read(index, ...).to(parameter.device_mesh.device_type)
            full = with_local(parameter, update).full_tensor()
            results = [orthogonalize(matrix) for matrix in full.view(-1, *full.shape[-2:])]
            shard: Any = shard_like(torch.stack(results).view(full.shape), parameter)
            write(index, ..., shard._local_tensor)
            continue
        key = (parameter.device_mesh, parameter.placements, parameter.shape)
        layout = layouts.get(key) or layouts.setdefault(key, ShardLayout.of(parameter))
        local = parameter._local_tensor
        is_matrix = parameter.ndim == 2
        if layout.has_full_matrices(parameter.shape):
            for at in [...] if is_matrix else range(local.shape[0]):
                if local.numel():
                    write(index, at, orthogonalize(read(index, at)))
        else:
            shape = parameter.shape[-2:]
            matrices = [None] if is_matrix else range(parameter.shape[0])
            shared += [_Matrix(index=index, at=at, shape=shape, layout=layout) for at in matrices]
    # Matrices of one size together, so that ranks have about the same amount of work.
    shared.sort(key=lambda matrix: matrix.shape.numel(), reverse=True)
    with hang_monitor.collective_scope("all_to_all of the matrices of Muon"):
        while shared:
            size = len(shared[0].layout.regions)
            device = torch.device(parameters[0].device_mesh.device_type)
            _orthogonalize_batch(shared[:size], device, read, orthogonalize, write)
            del shared[:size]


@frozen
class _Matrix:
    """A matrix: the index of its tensor, and its index in a tensor of several; None if it is the tensor."""

    index: int
    at: int | None
    shape: torch.Size
    layout: ShardLayout

    def block_of(self, rank: int) -> tuple[tuple[slice, slice], Any] | None:
        """Return a rank's block of the matrix, and its index in the rank's shard; None if it has none."""
        region = self.layout.regions[rank]
        if _is_empty(region):
            return None
        rows, columns = (slice(*bounds) for bounds in region[-2:])
        if self.at is None:
            return (rows, columns), ...
        first, end = region[0]
        return ((rows, columns), self.at - first) if first <= self.at < end else None


def _orthogonalize_batch(
    batch: Sequence[_Matrix], device: torch.device, read: Read, orthogonalize: Orthogonalize, write: Write
) -> None:
    """Orthogonalise at most one matrix per rank: the first on rank 0, and so on."""
    group, size = batch[0].layout.group, len(batch[0].layout.regions)
    me = dist.get_rank(group)
    own = [matrix.block_of(me) for matrix in batch]
    # 1. Send this rank's block of each matrix to the matrix's rank, which assembles it.
    sent = [
        read(matrix.index, block[1]).to(device) if block and me in matrix.layout.sources else None
        for matrix, block in zip(batch, own, strict=True)
    ]
    gathered: list[Any] = [None] * size
    if me < len(batch):
        gathered = [batch[me].block_of(rank) for rank in range(size)]
        sources = batch[me].layout.sources
        arriving = [block if rank in sources else None for rank, block in enumerate(gathered)]
    else:
        arriving = gathered
    received = _exchange(sent, arriving, group, device)
    # 2. Orthogonalise it, and send every rank its block.
    results: list[Tensor | None] = []
    if me < len(batch):
        full = torch.empty(batch[me].shape, dtype=torch.bfloat16, device=device)
        for values, block in zip(received, arriving, strict=True):
            if block:
                full[block[0]] = values
        full = orthogonalize(full)
        results = [full[block[0]] if block else None for block in gathered]
    for matrix, block, result in zip(batch, own, _exchange(results, own, group, device), strict=False):
        if block:
            write(matrix.index, block[1], result)


def _exchange(
    sent: Sequence[Tensor | None], arriving: Sequence[Any], group: Any, device: torch.device
) -> list[Tensor]:
    """Send a block of a matrix to each rank of a group, and receive a block from each.

    Ranks missing at the end of the lists send, or receive, nothing.
    """
    size = dist.get_world_size(group)
    shapes = [
        tuple(bounds.stop - bounds.start for bounds in block[0]) if block else (0, 0) for block in arriving
    ]
    counts = [rows * columns for rows, columns in shapes]
    flat = [part.flatten() for part in sent if part is not None]
    buffer = torch.cat(flat) if flat else torch.empty(0, dtype=torch.bfloat16, device=device)
    received = buffer.new_empty(sum(counts))
    leaving = [0 if part is None else part.numel() for part in sent]
    sizes = (row + [0] * (size - len(row)) for row in (counts, leaving))
    dist.all_to_all_single(received, buffer, *sizes, group=group)
    return [part.view(shape) for part, shape in zip(received.split(counts), shapes, strict=True)]
