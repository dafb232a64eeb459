"""Collectives on nested data, for devices that record operations: one message per dtype, in the program.

The buffers of `packing` are filled through views of bytes, each of which such a device would record: leaves
are joined and split by few operations instead. Whether the calls of the ranks fit together is compared over
the host, so that nothing waits for the device. All ranks record the same operations, since each executes its
own program, and the collectives in these have to meet.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import pad

from accel_ops import exchange, plan
from accel_ops.packing import flatten
from accel_ops.reduction import reduce_in_place
from accel_ops.same_call import check_same_call, mismatch
from accel_state.backends.single import SingleCollectives
from accel_state.devices.kinds import WITHOUT_STORAGE, own_runtime_of
from accel_state.errors import DistributedOperationException

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from accel_ops.packing import Flat
    from accel_ops.reduction import Scaling
    from accel_state.backends.base import Collectives

HOST = torch.device("cpu")


def is_recorded(device: torch.device) -> bool:
    """Whether a device records operations, and its collectives are those of this module."""
    return device.type in WITHOUT_STORAGE


def gather(collectives: Collectives, flat: Flat, device: torch.device, *, same_shapes: bool) -> Any:
    """Gather leaves, padded to the largest size of dimension 0 for the message; see `collect.gather`."""
    if own_runtime_of(device).is_global():
        return flat.data
    world_size = collectives.world_size
    leaves = [leaf.detach().to(device) for leaf in flat.leaves]
    leaves = [leaf if leaf.dim() else leaf[None] for leaf in leaves]
    rows = [[len(leaf)] * world_size for leaf in leaves] if same_shapes else _rows(collectives, flat)
    largest = [max(counts) for counts in rows]
    padded = [_with_rows(leaf, most) for leaf, most in zip(leaves, largest, strict=True)]
    if any(len({*counts}) > 1 for counts in rows):
        # What ranks pad differs, and must not be in the program of the message.
        own_runtime_of(device).flush()
    gathered = leaves.copy()
    for members in _by_dtype(flat):
        joined = torch.cat([padded[index].reshape(-1) for index in members])
        everything = joined.new_empty(world_size * joined.numel())
        collectives.all_gather_into(everything, joined)
        parts = everything.view(world_size, joined.numel()).split(_sizes(padded, members), dim=1)
        for index, part in zip(members, parts, strict=True):
            blocks = part.reshape(world_size, *padded[index].shape)
            gathered[index] = torch.cat(
                [block[:count] for block, count in zip(blocks.unbind(), rows[index], strict=True)]
            )
    return flat.rebuild(gathered)


def broadcast(collectives: Collectives, flat: Flat, source: int, device: torch.device) -> None:
    """Overwrite leaves by those of a rank; see `collect.broadcast`."""
    if own_runtime_of(device).is_global():
        return
    check_same_call(collectives, HOST, f"broadcast(from_process={source})", flat.plan)
    leaves = [leaf.detach() for leaf in flat.leaves]
    for members in _by_dtype(flat):
        joined = torch.cat([leaves[index].to(device).reshape(-1) for index in members])
        collectives.broadcast(joined, source)
        for index, part in zip(members, joined.split(_sizes(leaves, members)), strict=True):
            leaves[index].copy_(part.reshape(leaves[index].shape))


def reduce(collectives: Collectives, flat: Flat, scaling: Scaling, device: torch.device, call: str) -> Any:
    """Reduce leaves over the ranks, all of which make the same `call`; see `collect.reduce`."""
    if own_runtime_of(device).is_global():
        collectives, scaling = SingleCollectives(), replace(scaling, divisor=scaling.divisor and 1)
    check_same_call(collectives, HOST, call, flat.plan)
    leaves = [leaf.detach().to(device) for leaf in flat.leaves]
    results = leaves.copy()
    for members in _by_dtype(flat):
        pending = reduce_in_place(torch.cat([leaves[index].reshape(-1) for index in members]), scaling)
        collectives.all_reduce(pending.total, op=scaling.op)
        pending.finish()
        for index, part in zip(members, pending.final.split(_sizes(leaves, members)), strict=True):
            results[index] = part.reshape(leaves[index].shape).clone()
    return flat.rebuild(results)


def _rows(collectives: Collectives, flat: Flat) -> list[list[int]]:
    """Return the size of dimension 0 that every leaf has on every rank, exchanged over the host."""
    described = flat.plan.leaves
    order = sorted(range(len(described)), key=lambda index: described[index].path)
    name = str(plan.signature(described))  # structures that differ have tables of different names
    mine = torch.tensor([[described[index].rows for index in order]], dtype=torch.int64)
    try:
        table = exchange.gather(collectives, flatten({name: mine}, "gather"), HOST)[name]
    except DistributedOperationException:
        raise mismatch("gather", collectives, exchange.essentials(flat.plan)) from None
    columns: list[list[int]] = table.T.tolist()
    return [columns[order.index(index)] for index in range(len(order))]


def _with_rows(leaf: Tensor, rows: int) -> Tensor:
    """Append rows of zeros."""
    return leaf if len(leaf) == rows else pad(leaf, [0, 0] * (leaf.dim() - 1) + [0, rows - len(leaf)])


def _by_dtype(flat: Flat) -> list[list[int]]:
    """Return the indices of the leaves of every dtype, in an order that does not depend on that of dicts."""
    described = flat.plan.leaves
    groups: dict[str, list[int]] = {}
    for index in sorted(range(len(described)), key=lambda index: described[index].path):
        groups.setdefault(str(described[index].dtype), []).append(index)
    return [groups[dtype] for dtype in sorted(groups)]


def _sizes(leaves: Sequence[Tensor], members: Sequence[int]) -> list[int]:
    return [leaves[index].numel() for index in members]
