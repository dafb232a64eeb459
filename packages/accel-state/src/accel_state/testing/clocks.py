"""Vector clocks: which accesses to a storage are ordered by events, and which race.

The method is that of `torch.cuda._sanitizer`. Other than there, an access covers a range of bytes rather than
a pointer, so that views count, and every host thread is one more actor.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from accel_state.testing.queues import LateStream

Clock = dict[int, int]
"""For every actor how many of its accesses have happened."""


@dataclass(slots=True, eq=False)
class Actor:
    """A host thread, or what a host thread gives to a stream.

    Args:
        number: Its key in clocks.
        name: What messages call it.
        stream: The stream; None for a host thread.
    """

    number: int
    name: str
    stream: LateStream | None = None
    clock: Clock = field(default_factory=dict[int, int])

    def join(self, clock: Clock) -> None:
        """Order everything that the actor does from now on after what `clock` has seen."""
        for number, count in clock.items():
            if count > self.clock.get(number, 0):
                self.clock[number] = count

    def has_seen(self, access: Access) -> bool:
        """Whether an access is ordered before what the actor does from now on."""
        return access.count <= self.clock.get(access.actor.number, 0)


@dataclass(slots=True, eq=False)
class Access:
    """One read or write of a range of bytes.

    Args:
        actor: Who reads or writes.
        count: The actor's count of accesses, this one included.
        writes: Whether it writes.
        start: First byte in the storage.
        end: First byte after the range.
        what: The operator or copy.
        where: Place in the code.
    """

    actor: Actor
    count: int
    writes: bool
    start: int
    end: int
    what: str
    where: str

    def __str__(self) -> str:
        verb = "writes" if self.writes else "reads"
        return (
            f"{self.what} {verb} bytes {self.start} to {self.end} on {self.actor.name}\n    at {self.where}"
        )


@dataclass(frozen=True, slots=True)
class Race:
    """Two accesses to one storage, one of them a write, that nothing orders."""

    first: str
    second: str

    def __str__(self) -> str:
        return f"{self.second}\n  is not ordered after\n  {self.first}"


class History:
    """The accesses to one storage that later ones may race with."""

    def __init__(self) -> None:
        self.accesses: list[Access] = []

    def conflicts(self, access: Access) -> list[Race]:
        """Return the races of an access that is about to be added."""
        return [
            Race(str(before), str(access))
            for before in self.accesses
            if (before.writes or access.writes)
            and before.start < access.end
            and access.start < before.end
            and not access.actor.has_seen(before)
        ]

    def add(self, access: Access) -> None:
        """Remember an access and forget those that it makes redundant."""
        self.accesses = [
            before
            for before in self.accesses
            if not (
                access.start <= before.start
                and before.end <= access.end
                and (access.writes or (not before.writes and before.actor is access.actor))
            )
        ]
        self.accesses.append(access)

    def not_in(self, clock: Clock) -> list[Access]:
        """Return the accesses that a clock does not have."""
        return [access for access in self.accesses if access.count > clock.get(access.actor.number, 0)]
