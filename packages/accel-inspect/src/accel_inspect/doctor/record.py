"""Records of the runs of `accel doctor`. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from accel_state.frozen import frozen

RANKS, ONE, PLAIN, RESUMED = "ranks", "one", "plain", "resumed"
"""The runs: on the ranks; on one process with their global batches; on one process as the script is; on the
ranks from a checkpoint of the first run."""


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


@frozen
class Backward:
    """A backward pass; `batch` is the number of the batch that was read last, -1 before any."""

    batch: int
    loss: float
    items: float | None  # the `num_items` that were given
    where: str  # file and line


@dataclass(slots=True, kw_only=True)
class Step:
    """A step of a torch optimizer; tensors are digests by the name of their parameter."""

    optimizer: int  # the number of the optimizer in the run, by first step
    backwards: int  # how many backward passes came before
    rates: tuple[float, ...]  # of its groups
    gradients: Mapping[str, Digest | None]  # None for a parameter without a gradient
    before: Mapping[str, Digest]  # the weights before the step
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
    """

    loader: int
    epoch: int
    where: str
    is_prepared: bool
    shuffles: bool
    plan: tuple[tuple[int, ...], ...] | None = None


@dataclass(slots=True, kw_only=True)
class RunRecord:
    """The record of one process, which fills it while the script runs.

    Args:
        shards: Number of ranks with batches of their own; `shard` is the number of this one's.
        clock: The unit of schedules that the script has chosen, if it has.
        gathered: The number of calls of `gather` and `gather_for_metrics`.
        modules: The modules with parameters in the order in which they were executed, by name.
        tied: Names of parameters that are one.
        schedules: Whether schedules were prepared, by the name of their class.
        found: What one process finds by itself: texts by check, name of the diagnosis, and file and line.
        draws: File and line of a backward pass before which the script has drawn random numbers, if it has.
        differs_by: What makes numbers of ranks other ones by design, such as LocalSGD; empty if nothing does.
        losses: Whether only losses can be compared: the strategy keeps gradients in its own layout.
        loaders_at_save: The number of loaders that were read when the checkpoint was written; 0 before.
        saves_within_epoch: Whether the script saves its state while it reads a loader.
        stopped: Why and where the script ended before its end; empty if it did not.
    """

    run: str
    rank: int
    shards: int = 1
    shard: int = 0
    strategy: str = ""
    precision: str = "no"
    clock: str | None = None
    batches: list[ReadBatch] = field(default_factory=list[ReadBatch])
    backwards: list[Backward] = field(default_factory=list[Backward])
    steps: list[Step] = field(default_factory=list[Step])
    passes: list[LoaderPass] = field(default_factory=list[LoaderPass])
    gathered: int = 0
    modules: dict[str, None] = field(default_factory=dict[str, None])
    tied: tuple[tuple[str, ...], ...] = ()
    schedules: dict[str, bool] = field(default_factory=dict[str, bool])
    found: dict[tuple[str, str, str], str] = field(default_factory=dict[tuple[str, str, str], str])
    draws: str = ""
    differs_by: str = ""
    losses: bool = False
    loaders_at_save: int = 0
    saves_within_epoch: bool = False
    stopped: str = ""


Records = Mapping[str, Sequence[RunRecord]]
"""The records of each run, by rank."""
