"""Debug mode: before a collective, all ranks compare their calls."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from accel_state.errors import DistributedOperationException
from accel_state.rank_status import call_site, source_location

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from accel_state.backends.base import Collectives

SHOWN = 6  # leaves per rank in the table

Description = tuple[str, str, "tuple[int, ...] | None"]  # path, type, shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """The collective that one rank is about to call.

    Attributes:
        where: File and line of the user's program.
        operation: The name of the collective.
        detail: Its other arguments, as text.
        leaves: Path, type and shape of every leaf; no shape for what is not a tensor.
    """

    where: str
    operation: str
    detail: str = ""
    leaves: tuple[Description, ...] = ()


def compare_calls(
    collectives: Collectives,
    operation: str,
    leaves: Iterable[Description] = (),
    *,
    detail: str = "",
    rows_differ: bool = False,
) -> None:
    """Check that all ranks are about to call the same collective; called by every rank before each.

    Args:
        collectives: The collectives of the run.
        operation: The name of the collective.
        leaves: Path, type and shape of every leaf of its data.
        detail: Its other arguments, as text; they must agree.
        rows_differ: Sizes of dimension 0 need not agree.

    Raises:
        DistributedOperationException: Calls differ. Every rank raises it, with a table of where each rank
            is, what it calls, and on what.
    """
    where, _ = source_location(call_site(inspect.currentframe()))
    mine = Call(where=where, operation=operation, detail=detail, leaves=tuple(leaves))
    calls: list[Call] = collectives.all_gather_object(mine)
    if len({_essence(call, rows_differ=rows_differ) for call in calls}) > 1:
        raise DistributedOperationException(explain(calls, rows_differ=rows_differ))


def explain(calls: Sequence[Call], *, rows_differ: bool = False) -> str:
    """Format a table of the ranks' calls: rank, call site, operation, and the leaves in which they differ."""
    same_operation = len({(call.operation, call.detail) for call in calls}) == 1
    common = set.intersection(*(_facts(call, rows_differ=rows_differ) for call in calls))
    rows = [("rank", "call site", "operation", "shapes and dtypes")]
    for rank, call in enumerate(calls):
        odd = [leaf for leaf in call.leaves if not same_operation or _fact(leaf, rows_differ) not in common]
        shown = "; ".join(map(_text, odd[:SHOWN])) or ("-" if call.leaves else "no tensors")
        more = f"; and {len(odd) - SHOWN} more" if len(odd) > SHOWN else ""
        name = f"{call.operation} ({call.detail})" if call.detail else call.operation
        rows.append((str(rank), call.where or "?", name, shown + more))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    table = "\n".join(
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]])
        for row in rows
    )
    problem = "on data that does not fit together" if same_operation else "different operations"
    return f"The processes call {problem}; all stop here, since their collectives cannot complete.\n{table}"


def _text(leaf: Description) -> str:
    path, kind, shape = leaf
    return f"data{path}: {kind}{'' if shape is None else list(shape)}"


def _fact(leaf: Description, rows_differ: bool) -> Any:
    path, kind, shape = leaf
    if shape is None or not rows_differ:
        return leaf
    return path, kind, len(shape), shape[1:]


def _facts(call: Call, *, rows_differ: bool) -> set[Any]:
    return {_fact(leaf, rows_differ) for leaf in call.leaves}


def _essence(call: Call, *, rows_differ: bool) -> Any:
    return call.operation, call.detail, frozenset(_facts(call, rows_differ=rows_differ))
