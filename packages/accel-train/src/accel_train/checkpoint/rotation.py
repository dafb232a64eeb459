"""Which numbered checkpoints are kept, and which one is the newest: plans on numbers alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


def outdated(complete: Iterable[int], *, newest: int, limit: int | None) -> list[int]:
    """Return the checkpoints to prune after a commit.

    Args:
        complete: The numbers of all complete checkpoints, the new one among them or not.
        newest: The number of the new one, which always stays.
        limit: Number of checkpoints to keep; all if `None`.

    Returns:
        Numbers from the oldest on. What is not complete is not counted, nor deleted.

    Example:
        >>> outdated([1, 2, 3, 4], newest=4, limit=2)
        [1, 2]
    """
    if limit is None:
        return []
    others = sorted({*complete} - {newest})
    return others[: max(0, len(others) + 1 - max(1, limit))]


def complete_everywhere(found: Sequence[Iterable[int]]) -> list[int]:
    """Return the checkpoints that are complete on every node, oldest first.

    Args:
        found: For every host that has folders of its own, the numbers of its complete checkpoints.

    Example:
        >>> complete_everywhere([[1, 2, 3], [2, 1]])
        [1, 2]
    """
    return sorted(set[int](found[0]).intersection(*found[1:])) if found else []
