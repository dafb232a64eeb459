"""Refuse a collective on every rank if the ranks' calls do not fit together.

A collective that moves different numbers of bytes on different ranks ends a process or mixes values silently,
so ranks compare digests of their calls. Where a backend lets every rank send as many bytes as it likes, the
digest goes in front of the data, in one message. Elsewhere a small all-reduce comes first, with the maximum
of the digest and of its negative: both stay as they are if and only if all ranks have the same digest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from accel_ops import plan
from accel_ops.plan import describe
from accel_ops.tree import walk
from accel_state.calls import Description, compare_calls
from accel_state.errors import DistributedOperationException
from accel_state.hang_monitor import collective_scope

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping

    from torch import Tensor

    from accel_ops.packing import Plan
    from accel_state.backends.base import Collectives

MAX_SHOWN = 8  # differing leaves that a message lists
HEADER_BYTES = 32  # in front of the data of a chunk


def check_same_call(
    collectives: Collectives,
    device: torch.device,
    call: str,
    structure: Plan | int,
    chunk: Tensor | None = None,
) -> Tensor | None:
    """Check that every rank is about to make the same call on matching data.

    Args:
        collectives: The collectives of the run.
        device: Its device.
        call: The operation and its arguments besides the data, such as `"reduce('sum', scale=1.0)"`.
        structure: What the data is: paths, element types and shapes of its leaves, or a number of objects.
        chunk: Bytes to send along if they can be: data behind `HEADER_BYTES` for the digest, on the CPU.

    Raises:
        DistributedOperationException: The calls differ. Every rank raises it, with what differs.

    Returns:
        The chunks of all ranks as `Collectives.exchange_chunks` returns them, `None` if it cannot be used.
    """
    contents = structure if isinstance(structure, int) else structure_digest(structure)
    digest = plan.digest(f"{call}: {contents}")
    rows: Tensor | None = None
    if collectives.chunk_bytes:
        if chunk is None:
            chunk = torch.empty(HEADER_BYTES, dtype=torch.uint8)
        chunk[:HEADER_BYTES].view(torch.int64).fill_(digest)
        rows = collectives.exchange_chunks(chunk)
        heads: list[int] = rows.view(torch.int64)[:, 0].tolist()
        same = heads.count(digest) == len(heads)
    else:
        lanes = torch.tensor([digest, -digest], device=device)
        with collective_scope("all_reduce"):  # also over the read, in which a GPU's collective is waited for
            collectives.all_reduce(lanes, op="max")
            same = lanes.tolist() == [digest, -digest]
    if not same:
        raise mismatch(call, collectives, _facts(structure))
    return rows


def compare_in_debug_mode(
    collectives: Collectives, operation: str, *data: Any, detail: str = "", rows_differ: bool = False
) -> None:
    """Check that all ranks are about to call the same collective; called by every rank before each.

    Raises:
        DistributedOperationException: They are not. Every rank raises it, with a table of where each rank
            is, what it calls, and on what.
    """
    leaves = (_describe(path, leaf) for part in data for path, leaf in walk(part))
    compare_calls(collectives, operation, leaves, detail=detail, rows_differ=rows_differ)


def _describe(path: str, leaf: Any) -> Description:
    if isinstance(leaf, torch.Tensor):
        return path, str(leaf.dtype).removeprefix("torch."), tuple(leaf.shape)
    return path, type(leaf).__name__, None


def _facts(structure: Plan | int) -> dict[str, tuple[Hashable, str]]:
    """Return the properties that must agree, for `mismatch`."""
    if isinstance(structure, int):
        return {"": (structure, f"{structure} objects")}
    return {
        leaf.path: ((leaf.dtype, leaf.shape), describe(leaf.dtype, leaf.shape)) for leaf in structure.leaves
    }


def structure_digest(structure: Plan) -> int:
    """Return a number that is equal on ranks whose leaves agree in paths, dtypes and shapes."""
    found: int | None = structure.extras.get("structure")
    if found is None:
        facts = sorted((leaf.path, str(leaf.dtype), leaf.shape) for leaf in structure.leaves)
        found = structure.extras["structure"] = plan.digest(repr(facts))
    return found


def mismatch(
    call: str, collectives: Collectives, mine: Mapping[str, tuple[Hashable, str]]
) -> DistributedOperationException:
    """Return the error for calls that differ; every rank must ask for it at the same time."""
    calls: list[str]
    structures: list[Mapping[str, tuple[Hashable, str]]]
    calls, structures = zip(*collectives.all_gather_object((call, mine)), strict=True)  # pyright: ignore[reportAssignmentType] - pairs of these
    if len(set(calls)) > 1:
        listed = ", ".join(f"rank {rank} calls `{other}`" for rank, other in enumerate(calls))
        return DistributedOperationException(f"The ranks call different collectives: {listed}.")
    paths = dict.fromkeys(path for described in structures for path in described)
    rows = [(path, [described.get(path, (None, "nothing")) for described in structures]) for path in paths]
    differing = [(path, found) for path, found in rows if len({fact for fact, _ in found}) > 1]
    lines = [
        f"  data{path}: " + ", ".join(f"rank {rank} has {shown}" for rank, (_, shown) in enumerate(found))
        for path, found in differing[:MAX_SHOWN]
    ]
    if len(differing) > MAX_SHOWN:
        lines.append(f"  and {len(differing) - MAX_SHOWN} more")
    return DistributedOperationException(
        f"`{call}` needs the same structure on every rank. These leaves differ:\n" + "\n".join(lines)
    )
