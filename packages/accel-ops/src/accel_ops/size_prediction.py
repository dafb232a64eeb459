"""Predict the size of the first chunk of the next gather, the same on all ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from accel_state.backends.base import Collectives

UNSENT = -1  # where a message has not been filled in
SMALLEST = 1 << 10  # bytes of the smallest first chunk
LARGEST = 1 << 18  # bytes of the largest first chunk: beyond that, a second message costs less
MOST = 1 << 25  # bytes that the first chunks of all ranks together may take
MAX_GUESSES = 1024


@dataclass(slots=True)
class Guess:
    """The predicted size of the first chunk of the next gather; equal on all ranks.

    A guess may depend only on what all ranks know, or chunks would differ in size: on the structure that was
    gathered last, not on the one that this rank is about to gather.
    """

    largest: int = LARGEST
    last: int = 0
    pending: Tensor | None = None
    after: dict[int, tuple[int, int]] = field(default_factory=dict[int, tuple[int, int]])

    def capacity(self) -> int:
        """Return the bytes of the first chunk: enough for the last two gathers."""
        return max(self.after.get(self.last, (SMALLEST,)))

    def catch_up(self, rank: int) -> None:
        """Learn from the last message if an exception on this rank came in between: the others have."""
        heads, self.pending = self.pending, None
        if heads is not None and heads[rank, 0] != UNSENT:
            self.learn_from(heads[:, :4].tolist())

    def learn_from(self, prefixes: Sequence[Sequence[int]]) -> None:
        """Record a gather by the first numbers of the chunks of all ranks."""
        self.pending = None
        structures = {prefix[0] for prefix in prefixes}
        if len(structures) > 1:
            self.learn(0, SMALLEST)
        else:
            self.learn(structures.pop(), max(prefix[3] for prefix in prefixes))

    def learn(self, structure: int, need: int) -> None:
        """Record a gather: its structure's hash, and the bytes of the largest chunk that a rank needed."""
        if len(self.after) >= MAX_GUESSES:
            self.after.clear()
        enough = max(SMALLEST, 1 << (need - 1).bit_length()) if need <= self.largest else SMALLEST
        before = self.after.get(self.last, (SMALLEST,))[0]
        self.after[self.last] = (enough, before)
        self.last = structure


_guesses: tuple[Any, Guess] = (None, Guess())


def guess_of(collectives: Collectives) -> Guess:
    """Return the guess that belongs to these ranks; another run starts with a new one."""
    global _guesses  # noqa: PLW0603 - memory of this process about its peers
    if _guesses[0] is not collectives:
        share = max(SMALLEST, MOST // collectives.world_size)
        _guesses = (collectives, Guess(largest=min(LARGEST, share)))
    return _guesses[1]
