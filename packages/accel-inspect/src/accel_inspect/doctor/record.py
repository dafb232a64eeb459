"""Records of the runs of `accel doctor`. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from accel_state.frozen import frozen

RANKS, ONE, PLAIN, RESUMED, RESCALED = "ranks", "one", "plain", "resumed", "rescaled"
"""The runs: on the ranks; on one process with their global batches; on one process as the script is; on the
ranks from a checkpoint of the first run; from that checkpoint on one process, with the global batches."""


@frozen
class Digest:
    """A tensor in brief: its norm; its sum and at most 256 of its elements, evenly spaced; its dtype."""

    norm: float
    values: tuple[float, ...]
    dtype: str


@frozen
class ReadBatch:
    """A batch that a loader has yielded.

    Args:
        loader: The number of the loader in the run, by first use.
        epoch: The number of the pass over it.
        indices: The indices of its samples; empty where they are not known.
        rows: Digests of its rows.
        real: How many of its samples, from the beginning, are no padding.
        counts: By name, sums that a loss may be divided by, such as the labels that are not ignored.
        shape: The shapes of its tensors without the number of rows.
    """

    loader: int
    epoch: int
    indices: tuple[int, ...]
    rows: tuple[str, ...]
    real: int
    counts: Mapping[str, float]
    shape: tuple[tuple[int, ...], ...]

    @property
    def samples(self) -> tuple[int, ...] | tuple[str, ...]:
        """The identities of its real samples."""
        return (self.indices or self.rows)[: self.real]


@frozen
class Backward:
    """A backward pass.

    Args:
        batch: The number of the batch in `RunRecord.batches` that was read last; -1 before any.
        items: The `num_items` that were given.
        reduces: Whether DistributedDataParallel averages gradients over the ranks in it.
        seconds: What the rank took before it, since the pass or step before: no collective of DDP is in it.
        where: File and line.
    """

    batch: int
    loss: float
    dtype: str
    items: float | None
    reduces: bool
    seconds: float
    where: str


@dataclass(slots=True, kw_only=True)
class Step:
    """A step of a torch optimizer.

    Args:
        optimizer: The number of the optimizer in the run, by first step.
        name: Its class.
        is_prepared: Whether it was prepared, or all its parameters are in one that was.
        backwards: How many backward passes came before.
        rates: The learning rates of its groups.
        gradients: Digests by name of the parameter; None for a parameter without a gradient.
        before: Digests of the parameters before the step.
        weights: Digests of the parameters after the step.
    """

    optimizer: int
    name: str
    is_prepared: bool
    backwards: int
    rates: tuple[float, ...]
    gradients: Mapping[str, Digest | None]
    before: Mapping[str, Digest]
    weights: Mapping[str, Digest] = field(default_factory=dict[str, Digest])


@dataclass(slots=True, kw_only=True)
class LoaderPass:
    """A pass over a loader.

    Args:
        loader: Its number, by first use.
        epoch: The number of the pass.
        where: File and line of the loop.
        is_prepared: Whether `prepare` has made it.
        shuffles: Whether the order is meant to be another one in each epoch.
        plan: For each batch of the full epoch the indices of its samples that are no padding; None where the
            data decides.
        states: Attributes of the dataset that are random generators, which every worker has a copy of.
    """

    loader: int
    epoch: int
    where: str
    is_prepared: bool
    shuffles: bool
    plan: tuple[tuple[int, ...], ...] | None = None
    states: tuple[str, ...] = ()


@frozen
class Gathered:
    """A call of `gather` or `gather_for_metrics`: how many rows it returned, and how many pad the batch."""

    function: str
    where: str
    rows: int
    padding: int


@dataclass(slots=True, kw_only=True)
class RunRecord:
    """The record of one process, which fills it while the script runs.

    Args:
        shards: Number of ranks with batches of their own; `shard` is the number of this one's.
        clock: The unit of schedules that the script has chosen, if it has.
        modules: The modules with parameters in the order in which they were executed, by name.
        tied: Names of parameters that are one.
        schedules: Whether schedules were prepared, by the name of their class.
        norms: By name of a BatchNorm, the smallest number of values that it has normalised with.
        events: Names of diagnoses that the recorder itself has found, with file and line.
        waits: By file and line, how often the script's `item()` let the host wait for the device in training.
        draws: File and line of a backward pass before which the script has drawn random numbers, if it has.
        nbytes: Bytes of the gradients of all models.
        differs_by: What makes numbers of ranks other ones by design, such as LocalSGD; empty if nothing does.
        losses: Whether only losses can be compared: the strategy keeps gradients in its own layout.
        seconds: Duration of the script.
        stopped: Why and where the script ended before its end; empty if it did not.
    """

    run: str
    rank: int
    world: int = 1
    shards: int = 1
    shard: int = 0
    strategy: str = ""
    precision: str = "no"
    clock: str | None = None
    batches: list[ReadBatch] = field(default_factory=list[ReadBatch])
    backwards: list[Backward] = field(default_factory=list[Backward])
    steps: list[Step] = field(default_factory=list[Step])
    passes: list[LoaderPass] = field(default_factory=list[LoaderPass])
    gathered: list[Gathered] = field(default_factory=list[Gathered])
    modules: dict[str, None] = field(default_factory=dict[str, None])
    tied: tuple[tuple[str, ...], ...] = ()
    schedules: dict[str, bool] = field(default_factory=dict[str, bool])
    norms: dict[str, int] = field(default_factory=dict[str, int])
    events: dict[tuple[str, str], None] = field(default_factory=dict[tuple[str, str], None])
    waits: dict[str, int] = field(default_factory=dict[str, int])
    draws: str = ""
    nbytes: int = 0
    differs_by: str = ""
    losses: bool = False
    seconds: float = 0.0
    stopped: str = ""


Records = Mapping[str, Sequence[RunRecord]]
"""The records of each run, by rank."""


def by_shard(ranks: Sequence[RunRecord]) -> list[RunRecord]:
    """Return one rank of each data shard."""
    first: dict[int, RunRecord] = {}
    for record in ranks:
        first.setdefault(record.shard, record)
    return [*first.values()]


def first_of(records: Records, run: str) -> RunRecord | None:
    """Return the record of the first process of a run, if there is one."""
    return next(iter(records.get(run, ())), None)
