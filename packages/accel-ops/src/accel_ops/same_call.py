"""Refuse a collective on every rank if the ranks' calls do not fit together.

A collective that moves different numbers of bytes on different ranks ends a process or mixes values without a
word, so ranks compare before: each sends two 63-bit digests and their negatives through one small all-reduce
with the maximum. The maximum and the minimum of a digest are then known everywhere, and are equal if and only
if all ranks have the same one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from accel_ops import plan
from accel_ops.plan import describe
from accel_state.errors import DistributedOperationException

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping

    from accel_ops.packing import Plan
    from accel_state.backends.base import Collectives

MAX_SHOWN = 8  # differing leaves that a message lists
_MAX_CPU_RANKS = 16  # up to so many, a message between CPUs costs less than waiting for the devices' queues


def check_same_call(
    collectives: Collectives,
    device: torch.device,
    call: str,
    structure: Plan | int,
    meanwhile: Callable[[], None] | None = None,
) -> None:
    """Return if every rank is about to make the same call on data that fits together.

    Args:
        collectives: How to reach the other ranks.
        device: The device of the run.
        call: The operation and its arguments besides the data, such as `"reduce('sum', scale=1.0)"`.
        structure: What the data is: paths, element types and shapes of its leaves, or a number of objects.
        meanwhile: Work for the time that the comparison takes.

    Raises:
        DistributedOperationException: The calls differ. Every rank raises it, with what differs.
    """
    called = plan.digest(call)
    contents = structure if isinstance(structure, int) else structure_digest(structure)
    place = torch.device("cpu") if collectives.world_size <= _MAX_CPU_RANKS else device
    lanes = torch.tensor([called, contents, -called, -contents], device=place)
    collectives.all_reduce(lanes, meanwhile, op="max")
    most_called, most_contents, least_called, least_contents = lanes.tolist()
    if (most_called, most_contents) != (-least_called, -least_contents):
        if isinstance(structure, int):
            leaves: dict[str, tuple[Hashable, str]] = {"": (structure, f"{structure} objects")}
        else:
            leaves = {
                leaf.path: ((leaf.dtype, leaf.shape), describe(leaf.dtype, leaf.shape))
                for leaf in structure.leaves
            }
        raise mismatch(call, collectives, leaves)


def structure_digest(structure: Plan) -> int:
    """Return a number that ranks share if their leaves agree in paths, element types and shapes."""
    found: int | None = structure.extras.get("structure")
    if found is None:
        facts = sorted((leaf.path, str(leaf.dtype), leaf.shape) for leaf in structure.leaves)
        found = structure.extras["structure"] = plan.digest(repr(facts))
    return found


def mismatch(
    call: str, collectives: Collectives, mine: Mapping[str, tuple[Hashable, str]]
) -> DistributedOperationException:
    """Return the error for calls that differ; every rank must ask for it at the same time.

    Args:
        call: What this rank has called.
        collectives: How to reach the other ranks.
        mine: For every path of this rank's structure, what must agree, and what to show.
    """
    calls: list[str]
    structures: list[Mapping[str, tuple[Hashable, str]]]
    calls, structures = zip(*collectives.all_gather_object((call, mine)), strict=True)  # pyright: ignore[reportAssignmentType] - pairs of these
    if len(set(calls)) > 1:
        told = ", ".join(f"rank {rank} calls `{other}`" for rank, other in enumerate(calls))
        return DistributedOperationException(f"The ranks call different collectives: {told}.")
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
