"""What a rank did when it was tried, and how the ranks differ. Plain data."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from accel_cli.commands.estimate.memory import Buckets, Moment, Sizes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What a process that plays a rank is told.

    Args:
        script: The user's script.
        arguments: Its arguments.
        rank: The rank to play.
        world: Of how many.
        local_world: How many of them are on a machine.
        batches: How many batches every loader gives.
        output: The file to write the record to.
    """

    script: str
    arguments: tuple[str, ...]
    rank: int
    world: int
    local_world: int
    batches: int
    output: str = ""

    @property
    def environment(self) -> dict[str, str]:
        """The variables by which launchers tell a process which rank it is."""
        variables = {
            "RANK": self.rank,
            "WORLD_SIZE": self.world,
            "LOCAL_RANK": self.rank % self.local_world,
            "LOCAL_WORLD_SIZE": self.local_world,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": 29500,
        }
        return {name: str(value) for name, value in variables.items()}

    def to_text(self) -> str:
        """Write as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Order:
        """Read what `to_text` wrote."""
        table: dict[str, Any] = json.loads(text)
        table["arguments"] = tuple(table["arguments"])
        return cls(**table)


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that all ranks have to do together.

    Args:
        kind: What, such as `"gather"`.
        where: File and line of the script.
    """

    kind: str
    where: str


@dataclass(frozen=True, slots=True, kw_only=True)
class File:
    """A file that would be written.

    Args:
        name: Its path.
        nbytes: Its size, about.
        where: File and line of the script.
        form: How the checkpoint is divided that it belongs to, if it does.
        full_nbytes: Bytes of it and of the parts that other ranks write.
    """

    name: str
    nbytes: int
    where: str
    form: str = ""
    full_nbytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What one rank did.

    Args:
        rank: Which one.
        strategy: The name of the strategy that would train; empty if no `Accelerator` was made.
        counted_as: The name that estimates have for it, if its own code has not run.
        axes: Along which the ranks divide the work, and how many there are along each.
        offloaded: Whether parameters, gradients and optimizer states are in main memory.
        precision: The mixed precision.
        buckets: What DeepSpeed sets aside.
        sizes: The models, in elements; None if none was prepared.
        moments: The fullest moments of its passes.
        parts: What it holds when it holds most, in bytes by kind, if the strategy's own code has run.
        host: Bytes of main memory for what is moved there, such as a model that is brought together.
        events: What it would have done together with the others, in order.
        files: What it would have written.
        stopped: Why and where the script ended before its end; empty if it did not.
    """

    rank: int
    strategy: str = ""
    counted_as: str = ""
    axes: Mapping[str, int] = field(default_factory=dict[str, int])
    offloaded: bool = False
    precision: str = "no"
    buckets: Buckets = field(default_factory=Buckets)
    sizes: Sizes | None = None
    moments: tuple[Moment, ...] = ()
    parts: Mapping[str, int] = field(default_factory=dict[str, int])
    host: int = 0
    events: tuple[Event, ...] = ()
    files: tuple[File, ...] = ()
    stopped: str = ""

    def to_text(self) -> str:
        """Write as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Record:
        """Read what `to_text` wrote."""
        table: dict[str, Any] = json.loads(text)
        sizes: dict[str, Any] | None = table["sizes"]
        kinds: Mapping[str, type[Any]] = {"moments": Moment, "events": Event, "files": File}
        for name, kind in kinds.items():
            table[name] = tuple(kind(**row) for row in table[name])
        table["buckets"] = Buckets(**table["buckets"])
        if sizes is not None:
            sizes["blocks"] = tuple(sizes["blocks"])
            table["sizes"] = Sizes(**sizes)
        return cls(**table)


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first point at which two ranks part.

    Args:
        ranks: The ranks that do as the second says.
        first: What rank `of` does; None if it has ended.
        second: What these do; None if they have ended.
        of: The rank that they are compared with.
    """

    ranks: tuple[int, ...]
    first: Event | None
    second: Event | None
    of: int = field(default=0)

    def __str__(self) -> str:
        one, others = f"rank {self.of}", f"rank {', '.join(map(str, self.ranks))}"
        return f"{one} {_does(self.first)}, while {others} {_does(self.second)}: both would wait forever"


def differences(records: Sequence[Record]) -> list[Difference]:
    """Find where ranks part; each is compared with the first.

    Args:
        records: Of the ranks that were tried.

    Example:
        >>> one = Record(rank=0, events=(Event(kind="gather", where="train.py:3"),))
        >>> print(differences([one, Record(rank=1)])[0])
        rank 0 calls gather at train.py:3, while rank 1 has ended: both would wait forever
    """
    found: dict[tuple[Event | None, Event | None], list[int]] = {}
    first = records[0]
    for other in records[1:]:
        pair = _part(first, other)
        if pair is not None:
            found.setdefault(pair, []).append(other.rank)
    return [
        Difference(ranks=tuple(ranks), first=mine, second=theirs, of=first.rank)
        for (mine, theirs), ranks in found.items()
    ]


def _part(first: Record, second: Record) -> tuple[Event | None, Event | None] | None:
    for mine, theirs in zip(first.events, second.events, strict=False):
        if mine != theirs:
            return mine, theirs
    if len(first.events) == len(second.events):
        return None
    shorter = min(first, second, key=lambda record: len(record.events))
    if shorter.stopped:  # what it would have done after that is not known
        return None
    at = len(shorter.events)
    return tuple((record.events[at : at + 1] or (None,))[0] for record in (first, second))  # pyright: ignore[reportReturnType] - two of them


def _does(event: Event | None) -> str:
    return "has ended" if event is None else f"calls {event.kind} at {event.where}"


def ranks_to_try(world: int, local_world: int) -> tuple[int, ...]:
    """The ranks that scripts treat differently: the first and the last, and the first of other machines.

    Args:
        world: How many there are.
        local_world: How many on a machine.

    Example:
        >>> ranks_to_try(128, 8), ranks_to_try(1, 8)
        ((0, 1, 8, 127), (0,))
    """
    return tuple(sorted({rank for rank in (0, 1, local_world, world - 1) if 0 <= rank < world}))
