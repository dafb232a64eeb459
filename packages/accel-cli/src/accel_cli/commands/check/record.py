"""Records, differences, starting ranks; torch-free."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

from accel_cli.commands.estimate.memory import Buckets, MemoryPeak, ModelSizes


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTask:
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
class RecordedCollective:
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
class SelectedStrategy:
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
class LoaderRecord:
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
class RankRecord:
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
    strategy: SelectedStrategy = field(default_factory=SelectedStrategy)
    fp8: str = ""
    buckets: Buckets = field(default_factory=Buckets)
    on_rank: int = 0
    sizes: ModelSizes | None = None
    moments: tuple[MemoryPeak, ...] = ()
    parts: Mapping[str, int] = field(default_factory=dict[str, int])
    host: int = 0
    events: tuple[RecordedCollective, ...] = ()
    files: tuple[File, ...] = ()
    loaders: tuple[LoaderRecord, ...] = ()
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
    first: RecordedCollective | None
    second: RecordedCollective | None
    of: int = field(default=0)

    def __str__(self) -> str:
        one, others = f"rank {self.of}", f"rank {', '.join(map(str, self.ranks))}"
        return f"{one} {_does(self.first)}, while {others} {_does(self.second)}: both would wait forever"


def differences(records: Sequence[RankRecord]) -> list[Difference]:
    """Find the first difference of each rank from the first one.

    Example:
        >>> one = RankRecord(rank=0, events=(RecordedCollective(kind="gather", where="train.py:3"),))
        >>> print(differences([one, RankRecord(rank=1)])[0])
        rank 0 calls gather at train.py:3, while rank 1 has ended: both would wait forever
    """
    found: dict[tuple[RecordedCollective | None, RecordedCollective | None], list[int]] = {}
    first = records[0]
    for other in records[1:]:
        pair = _part(first, other)
        if pair is not None:
            found.setdefault(pair, []).append(other.rank)
    return [
        Difference(ranks=tuple(ranks), first=mine, second=theirs, of=first.rank)
        for (mine, theirs), ranks in found.items()
    ]


def _part(
    first: RankRecord, second: RankRecord
) -> tuple[RecordedCollective | None, RecordedCollective | None] | None:
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


def _does(event: RecordedCollective | None) -> str:
    return "has ended" if event is None else f"calls {event.kind} at {event.where}"


def data_problems(records: Sequence[RankRecord]) -> list[str]:
    """Find loaders by which ranks read the same samples, or miss some.

    Example:
        >>> loaders = [(LoaderRecord(where="train.py:3", shard=rank, batches=("a",)),) for rank in (0, 1)]
        >>> for problem in data_problems([RankRecord(rank=rank, loaders=loaders[rank]) for rank in (0, 1)]):
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


def ranks_to_check(world: int, local_world: int) -> tuple[int, ...]:
    """Return the ranks that scripts treat differently: the first, the last, and the first of other nodes.

    Example:
        >>> ranks_to_check(128, 8), ranks_to_check(1, 8)
        ((0, 1, 8, 127), (0,))
    """
    return tuple(sorted({rank for rank in (0, 1, local_world, world - 1) if 0 <= rank < world}))


WORKER = "accel_cli.commands.check.rank_worker"

CAN_FORK = sys.platform == "linux"
"""Whether one process imports common modules and forks the ranks; on other systems, whose libraries do not
survive a fork, every rank is spawned."""


def run_ranks(orders: Sequence[RankTask], variables: Mapping[str, str], *, timeout: int) -> list[RankRecord]:
    """Run the script as selected ranks, each in its own process."""
    at_once = os.cpu_count() or 1
    with tempfile.TemporaryDirectory(prefix="accel-check-") as folder:
        with_files = [replace(order, output=str(Path(folder) / f"{order.rank}.record")) for order in orders]
        groups = [with_files] if CAN_FORK else [[order] for order in with_files]
        with ThreadPoolExecutor(at_once) as pool:
            output = pool.map(lambda group: _run(group, variables, timeout=timeout, at_once=at_once), groups)
            sayings = [one for group, one in zip(groups, output, strict=True) for _ in group]
        return [_record(order, saying) for order, saying in zip(with_files, sayings, strict=True)]


def _run(orders: Sequence[RankTask], variables: Mapping[str, str], *, timeout: int, at_once: int) -> str:
    """Run one process for all ranks; return the reason for ranks without a record."""
    path = Path(orders[0].output).with_suffix(".orders")
    path.write_bytes(pickle.dumps((orders, timeout, at_once)))
    environment = orders[0].environment if len(orders) == 1 else {}
    try:
        done = subprocess.run(
            [sys.executable, "-m", WORKER, str(path)],
            env={**variables, **environment},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=None if len(orders) > 1 else timeout,
        )
    except subprocess.TimeoutExpired:
        return timeout_reason(timeout)
    return exit_reason(done.returncode, done.stderr)


def _record(order: RankTask, saying: str) -> RankRecord:
    path = Path(order.output)
    if not path.is_file():
        return RankRecord(rank=order.rank, stopped=saying)
    return pickle.loads(path.read_bytes())  # noqa: S301 - a worker of ours wrote it


def timeout_reason(timeout: int) -> str:
    """Return the reason of a rank that was stopped at the timeout."""
    return (
        f"it has not ended after {timeout} s (--timeout); values are made up, so that a loop that waits for"
        " one may never end"
    )


def exit_reason(code: int, output: str) -> str:
    """Return the reason of a rank whose process has exited without a record."""
    lines = output.strip().splitlines() or ["nothing was said"]
    return f"it ended with exit code {code}: {lines[-1]}"
