"""The records of checked ranks, and their differences. Plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from accel_cli.commands.estimate.memory import Buckets

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from accel_cli.commands.estimate.memory import Moment, Sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """The arguments of a process that runs as a rank.

    Args:
        local_world: Ranks of a node.
        batches: Number of batches of every loader.
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
        """The variables by which launchers pass rank and world size to a process."""
        variables = {
            "RANK": self.rank,
            "WORLD_SIZE": self.world,
            "LOCAL_RANK": self.rank % self.local_world,
            "LOCAL_WORLD_SIZE": self.local_world,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": 29500,
        }
        return {name: str(value) for name, value in variables.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """A collective.

    Args:
        nbytes: Device memory of the rank at that moment.
    """

    kind: str
    where: str
    nbytes: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class File:
    """A file that would be written.

    Args:
        form: The form of its checkpoint, if it belongs to one.
        full_nbytes: Bytes of it and of the shards that other ranks write.
    """

    name: str
    nbytes: int
    where: str
    form: str = ""
    full_nbytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """The strategy of a rank.

    Args:
        counted_as: Its name among the estimates, if its own code does not run.
        offloaded: Whether parameters, gradients and optimizer states are on the host.
    """

    name: str = ""
    counted_as: str = ""
    axes: Mapping[str, int] = field(default_factory=dict[str, int])
    offloaded: bool = False
    precision: str = "no"


@dataclass(frozen=True, slots=True, kw_only=True)
class Loader:
    """A prepared loader.

    Args:
        where: File and line of the script that prepared it.
        shard: The data shard of the rank.
        indices: Digest of the indices of a custom sampler that `prepare` shards; empty where there is none.
        batches: Digests of the batches that were read; none if all their values are the same.
    """

    where: str
    shard: int
    indices: str = ""
    batches: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """The record of one rank.

    Args:
        strategy: The strategy that would train; its name is empty if no `Accelerator` was made.
        fp8: The title of the library that multiplies matrices in 8 bits; empty if none does.
        on_rank: Elements of parameters that Megatron keeps on the rank.
        sizes: The models, in elements; None if none was prepared.
        moments: The moments of its passes that need most memory.
        parts: Its peak in bytes by kind, if the strategy's own code has run.
        host: Peak of host bytes for tensors that are moved there, such as a gathered model.
        loaders: Its prepared loaders, in order.
        stopped: Why and where the script ended before its end; empty if it did not.
    """

    rank: int
    strategy: Chosen = field(default_factory=Chosen)
    fp8: str = ""
    buckets: Buckets = field(default_factory=Buckets)
    on_rank: int = 0
    sizes: Sizes | None = None
    moments: tuple[Moment, ...] = ()
    parts: Mapping[str, int] = field(default_factory=dict[str, int])
    host: int = 0
    events: tuple[Event, ...] = ()
    files: tuple[File, ...] = ()
    loaders: tuple[Loader, ...] = ()
    stopped: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first collective in which two ranks differ.

    Args:
        ranks: The ranks that call `second`.
        first: The collective of rank `of`; None if it has ended.
        second: The collective of `ranks`; None if they have ended.
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
    """Find the first difference of each rank from the first one.

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
    if shorter.stopped:  # its collectives after that are not known
        return None
    at = len(shorter.events)
    return tuple((record.events[at : at + 1] or (None,))[0] for record in (first, second))  # pyright: ignore[reportReturnType] - two of them


def _does(event: Event | None) -> str:
    return "has ended" if event is None else f"calls {event.kind} at {event.where}"


def data_problems(records: Sequence[Record]) -> list[str]:
    """Find loaders by which ranks read the same samples, or miss some.

    Example:
        >>> loaders = [(Loader(where="train.py:3", shard=rank, batches=("a",)),) for rank in (0, 1)]
        >>> for problem in data_problems([Record(rank=rank, loaders=loaders[rank]) for rank in (0, 1)]):
        ...     print(problem)
        rank 0 and rank 1 read the same samples from the loader prepared at train.py:3
    """
    first, *following = records
    problems: dict[str, None] = {}
    for other in following:
        for one, two in zip(first.loaders, other.loaders, strict=False):
            ranks = f"rank {first.rank} and rank {other.rank}"
            if one.shard == two.shard or one.where != two.where:
                continue
            if one.indices and two.indices and one.indices != two.indices:
                problems[
                    f"{ranks} miss samples of the loader prepared at {one.where}: its sampler gives each "
                    "rank other indices, which prepare() shards again; say "
                    "DataLoaderConfiguration(already_sharded=True)"
                ] = None
            elif one.batches and one.batches == two.batches:
                problems[f"{ranks} read the same samples from the loader prepared at {one.where}"] = None
    return list(problems)


def ranks_to_try(world: int, local_world: int) -> tuple[int, ...]:
    """Return the ranks that scripts treat differently: the first, the last, and the first of other nodes.

    Example:
        >>> ranks_to_try(128, 8), ranks_to_try(1, 8)
        ((0, 1, 8, 127), (0,))
    """
    return tuple(sorted({rank for rank in (0, 1, local_world, world - 1) if 0 <= rank < world}))
