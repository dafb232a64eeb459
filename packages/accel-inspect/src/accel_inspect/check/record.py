"""Records of the ranks of `accel check`, and their comparison. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from itertools import permutations, zip_longest
from typing import Any

from accel_inspect.estimate.memory import Estimate
from accel_state.frozen import frozen


@frozen
class RecordedCollective:
    """A collective, or a transfer between two ranks.

    Args:
        stage: The position in the pipeline of the rank, if the ranks of that stage alone take part.
        peer: The other rank of a transfer.
        transferred: Bytes of a transfer.
    """

    kind: str
    where: str
    stage: int | None = None
    peer: int | None = field(default=None, compare=False)
    transferred: int = field(default=0, compare=False)

    def __str__(self) -> str:
        if self.peer is None:
            return f"{self.kind} at {self.where}"
        preposition = "to" if self.kind == "send" else "from"
        return f"{self.kind} {self.transferred} bytes {preposition} rank {self.peer} at {self.where}"


@frozen
class File:
    """A file that would be written."""

    name: str
    nbytes: int
    where: str


@frozen
class LoaderRecord:
    """A prepared loader.

    Args:
        where: File and line of the script that prepared it.
        shard: The data shard of the rank.
        indices: The sorted indices of a custom sampler that `prepare` shards; empty where there is none.
        batches: Digests of the batches that were read; none if all their values are the same.
    """

    where: str
    shard: int
    indices: str = ""
    batches: tuple[str, ...] = ()


@frozen
class RankRecord:
    """The record of one rank.

    Args:
        memory: As tracked, or an estimate if its strategy's code did not run; None without a model, and under
            Megatron.
        loaders: Its prepared loaders, in order.
        stopped: Why and where the script stopped early; empty if it completed.
    """

    rank: int
    memory: Estimate | None = None
    events: tuple[RecordedCollective, ...] = ()
    files: tuple[File, ...] = ()
    loaders: tuple[LoaderRecord, ...] = ()
    stopped: str = ""

    @property
    def stage(self) -> int | None:
        """The position of the rank in its pipeline, if it has run a schedule."""
        return next((event.stage for event in self.events if event.stage is not None), None)


def differences(records: Sequence[RankRecord]) -> list[str]:
    """Find the first collective in which each rank differs from the first one (of its stage, if any).

    Example:
        >>> record = RankRecord(rank=0, events=(RecordedCollective(kind="gather", where="train.py:3"),))
        >>> print(differences([record, RankRecord(rank=1)])[0])
        rank 0 calls gather at train.py:3, while rank 1 has ended: both would wait forever
    """
    ranks_by_pair: dict[Any, list[int]] = {}
    first_of_stage: dict[int | None, RankRecord] = {}
    for record in records:
        for first in (records[0], first_of_stage.setdefault(record.stage, record)):
            if (pair := _first_difference(first, record)) is not None:
                texts = ("has ended" if e is None else f"calls {e.kind} at {e.where}" for e in pair)
                ranks_by_pair.setdefault((first.rank, *texts), []).append(record.rank)
                break
    return [
        f"rank {first} {event}, while rank {', '.join(map(str, ranks))} {other}: both would wait forever"
        for (first, event, other), ranks in ranks_by_pair.items()
    ]


def transfer_problems(records: Sequence[RankRecord]) -> list[str]:
    """Find pairs of ranks where the sent and the received tensors differ.

    Example:
        >>> send, receive = (
        ...     RecordedCollective(kind=kind, where="train.py:3", peer=peer, transferred=nbytes)
        ...     for kind, peer, nbytes in (("send", 1, 8), ("receive", 0, 4))
        ... )
        >>> records = [RankRecord(rank=0, events=(send,)), RankRecord(rank=1, events=(receive,))]
        >>> print(*transfer_problems(records))
        rank 0 sends 8 bytes to rank 1 at train.py:3, which expects 4
    """
    problems: list[str] = []
    for sender, receiver in permutations(records, 2):
        sent = [event for event in sender.events if (event.kind, event.peer) == ("send", receiver.rank)]
        expected = [e for e in receiver.events if (e.kind, e.peer) == ("receive", sender.rank)]
        for event, other in zip(sent, expected, strict=False):  # `differences` finds missing schedules
            if event.transferred != other.transferred:
                problems.append(
                    f"rank {sender.rank} sends {event.transferred} bytes to rank {receiver.rank} at "
                    f"{event.where}, which expects {other.transferred}"
                )
                break
    return problems


def _first_difference(
    first: RankRecord, second: RankRecord
) -> tuple[RecordedCollective | None, RecordedCollective | None] | None:
    """Return the first two collectives that differ, None for a rank that has ended; None if all are equal."""
    stages = {first.stage, second.stage}
    events = [
        # What a rank sends outside of a stage, another one receives: `transfer_problems` compares them.
        [e for e in record.events if (e.peer is None if e.stage is None else len(stages) == 1)]
        for record in (first, second)
    ]
    for event, other in zip_longest(*events):
        if event == other:
            continue
        # The collectives of a rank that stopped early are not known.
        if (event is None and first.stopped) or (other is None and second.stopped):
            return None
        return event, other
    return None


def data_problems(records: Sequence[RankRecord]) -> list[str]:
    """Find loaders that give ranks the same samples, or skip samples.

    Example:
        >>> loaders = [(LoaderRecord(where="train.py:3", shard=rank, batches=("a",)),) for rank in (0, 1)]
        >>> for problem in data_problems([RankRecord(rank=rank, loaders=loaders[rank]) for rank in (0, 1)]):
        ...     print(problem)
        rank 0 and rank 1 read the same samples from the loader prepared at train.py:3
    """
    first, *others = records
    problems: list[str] = []
    for record in others:
        ranks = f"rank {first.rank} and rank {record.rank}"
        for loader, other in zip(first.loaders, record.loaders, strict=False):
            if loader.shard == other.shard or loader.where != other.where:
                continue
            if loader.indices and other.indices and loader.indices != other.indices:
                problems.append(
                    f"{ranks} miss samples of the loader prepared at {loader.where}. Its sampler "
                    "already shards the indices, and prepare() shards them again. Pass "
                    "DataLoaderConfiguration(already_sharded=True)"
                )
            elif loader.batches and loader.batches == other.batches:
                problems.append(f"{ranks} read the same samples from the loader prepared at {loader.where}")
    return [*dict.fromkeys(problems)]


def ranks_to_check(world: int, local_world: int) -> tuple[int, ...]:
    """Return the ranks that scripts treat differently: the first, the last, and the first of other nodes.

    Example:
        >>> ranks_to_check(128, 8), ranks_to_check(1, 8)
        ((0, 1, 8, 127), (0,))
    """
    return tuple(sorted({rank for rank in (0, 1, local_world, world - 1) if 0 <= rank < world}))
