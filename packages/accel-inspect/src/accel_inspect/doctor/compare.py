"""Compare the records of a run on ranks with those of one process. Pure functions; nothing imports torch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any

from accel_inspect.doctor.causes import Diagnosis
from accel_inspect.doctor.record import (
    ONE,
    PLAIN,
    RANKS,
    RESCALED,
    RESUMED,
    Digest,
    LoaderPass,
    Records,
    RunRecord,
    Step,
    by_shard,
    first_of,
)

TOLERANCES = {"float64": 1e-9, "float32": 5e-4, "float16": 2e-2, "bfloat16": 5e-2, "float8": 0.25}
"""Relative differences that are rounding, by dtype; in FP8 each rank scales by its own largest value, too."""

_MIXED = {"fp16": "float16", "bf16": "bfloat16", "fp8": "float8"}
_NOISE = 1e-5  # norm of a gradient, relative to that of all, below which it is rounding
_GROWTH = 5  # of the rounding of gradients with each step: the weights before it are rounded, too
_FEW_VALUES = 32  # of a BatchNorm, below which its statistics are those of no larger batch
_SLOW, _SLOW_SECONDS = 2.0, 0.05  # how much longer than the fastest rank a straggler takes
FLOOR = 0.1
"""Part of the norm of all gradients; a ReLU that rounds to the other side changes small gradients most."""


def compare(records: Records) -> list[Diagnosis]:
    """Compare the runs. Returns the diagnoses of each check, or one that reports that all is equal."""
    first = records[RANKS][0]
    checks = CHECKS
    diagnoses = [*stops(records)]
    if any(record.stopped for record in records[RANKS]):
        checks = {name: CHECKS[name] for name in ("data", "clocks")}
    for name, check in checks.items():
        if name == "resume" and (
            first.differs_by or random_numbers(records) or any(map(_differs, diagnoses))
        ):
            records = {run: of_run for run, of_run in records.items() if run != RESCALED}
        found = [diagnosis._replace(check=name) for diagnosis in check(records)]
        diagnoses += found
        if checks is CHECKS and not any(map(_differs, found)) and (text := _equal(name, records)):
            diagnoses.append(Diagnosis("", text, check=name))
    return diagnoses


def _differs(diagnosis: Diagnosis) -> bool:
    return diagnosis.differs or diagnosis.name == "numbers-not-compared"


def _equal(name: str, records: Records) -> str:
    """Describe what a check has found to be equal; empty if the runs have nothing of the kind."""
    first, single = records[RANKS][0], first_of(records, ONE)
    if name == "data" and (passes := sum(of_loader.is_prepared for of_loader in first.passes)):
        samples = sum(batch.real for record in by_shard(records[RANKS]) for batch in record.batches)
        return f"{samples} samples in {passes} passes, as on one process"
    if name == "gathered" and first.gathered:
        return f"{len(first.gathered)} calls of gather and gather_for_metrics"
    if name == "numbers" and single is not None and not single.stopped and first.steps:
        if first.differs_by or random_numbers(records):
            return ""
        what = "losses" if first.losses else "losses, gradients and weights"
        steps, tolerance = comparable_steps(first, single), tolerance_of(first, single)
        return f"{what} of {steps} optimizer steps, to {tolerance:.0e}"
    if name == "clocks" and first.steps:
        return f"{len(first.steps)} optimizer steps and their learning rates"
    if name == "waiting" and any(backward.reduces for backward in first.backwards):
        return f"one all-reduce of {first.nbytes} bytes for each step"
    if name == "resume" and RESUMED in records:
        return "the steps after a checkpoint, on as many ranks and on one process"
    return ""


_TITLES = {
    ONE: "on one process with the batches of all ranks",
    PLAIN: "on one process",
    RESUMED: "resumed on the same number of ranks",
    RESCALED: "resumed on one process",
}


def stops(records: Records) -> Iterator[Diagnosis]:
    """Yield the reasons why scripts stopped early."""
    failed = {run for run, of_run in records.items() if any(record.stopped for record in of_run)}
    for run in records:
        has_no_checkpoint = run in {RESUMED, RESCALED} and RANKS in failed
        if run not in failed or has_no_checkpoint or (run == RESCALED and ONE in failed):
            continue
        stopped = [record for record in records[run] if record.stopped]
        first = next((record for record in stopped if "has not ended" not in record.stopped), stopped[0])
        if run != RANKS:
            name = "one-process-stopped" if run in {ONE, PLAIN} else "resume-stopped"
            yield Diagnosis(name, f"{_TITLES[run]}: {first.stopped}", check="run")
        else:
            name = "unused-parameters" if "finished reduction" in first.stopped else "rank-stopped"
            yield Diagnosis(name, f"rank {first.rank}: {first.stopped}", check="run")


# 1. Data.


def data(records: Records) -> Iterator[Diagnosis]:
    """Compare the samples that ranks read: each sample once, in the order of one process."""
    ranks, single = by_shard(records[RANKS]), first_of(records, ONE)
    for first in ranks[0].passes:
        passes = [same for record in ranks if (same := _same_pass(record, first)) is not None]
        if len(passes) < len(ranks):
            if not any(record.stopped for record in ranks):
                text = f"{len(passes)} of {len(ranks)} ranks iterate over it in epoch {first.epoch}"
                yield Diagnosis("uneven-batches", text, first.where)
            continue
        if len(ranks) > 1 and (difference := _compare_pass(ranks, passes, single)):
            yield Diagnosis(*difference, first.where)
        if first.states and first.epoch == 0:
            text = f"each worker has its own copy of the data set's {', '.join(first.states)}"
            yield Diagnosis("generator-in-workers", text, first.where)
        second = next(
            (later for later in ranks[0].passes if (later.loader, later.epoch) == (first.loader, 1)), None
        )
        if first.epoch == 0 and first.shuffles and second is not None:
            orders = [of_epoch.plan or tuple(_rows(ranks[0], of_epoch)) for of_epoch in (first, second)]
            if len(orders[0]) > 1 and orders[0] == orders[1]:
                text = "two epochs have the same order although the sampler shuffles"
                yield Diagnosis("epoch-not-set", text, first.where)


def _same_pass(record: RunRecord, other: LoaderPass) -> LoaderPass | None:
    key = (other.loader, other.epoch)
    return next((own for own in record.passes if (own.loader, own.epoch) == key), None)


def _compare_pass(
    ranks: Sequence[RunRecord], passes: Sequence[LoaderPass], single: RunRecord | None
) -> tuple[str, str] | None:
    """Name and describe how a pass of the ranks differs from that of one process."""
    first = passes[0]
    plans = [of_rank.plan for of_rank in passes if of_rank.plan is not None]
    if len(plans) < len(passes):
        return _compare_read(ranks, first, single)
    lengths = [*map(len, plans)]
    if len({*lengths}) > 1:
        return "uneven-batches", f"ranks have {', '.join(map(str, lengths))} batches"
    alone = None if single is None else _same_pass(single, first)
    if alone is None or alone.plan is None:
        return None
    union = Counter(sample for plan in plans for batch in plan for sample in batch)
    wanted = Counter(sample for batch in alone.plan for sample in batch)
    missing, extra = (wanted - union).total(), (union - wanted).total()
    if missing or extra >= len(ranks):
        return "other-samples-per-rank" if extra else "sharded-twice", (
            f"of {wanted.total()} samples of epoch {first.epoch}, {missing} are read by no rank, "
            f"and {extra} are read too often"
        )
    if extra or lengths[0] != len(alone.plan):
        return None  # the script has chosen another batch size
    for number, together in enumerate(zip(*plans, strict=True)):
        if sorted(sample for batch in together for sample in batch) != sorted(alone.plan[number]):
            text = f"batch {number} of epoch {first.epoch} has different samples than in one process"
            return "order-differs", text
    return None


def _compare_read(
    ranks: Sequence[RunRecord], first: LoaderPass, single: RunRecord | None
) -> tuple[str, str] | None:
    """Compare the rows that were read for training, where no sampler says which samples they are."""
    rows = [_rows(record, first) for record in ranks]
    read = {ranks[0].batches[backward.batch].loader for backward in ranks[0].backwards if backward.batch >= 0}
    if first.loader not in read or not rows[0]:
        return None
    if all(of_rank == rows[0] for of_rank in rows[1:]):
        name = "stream-read-in-full" if first.is_prepared else "loader-not-prepared"
        return name, f"all {len(ranks)} ranks read the same {len(rows[0])} rows in epoch {first.epoch}"
    if first.is_prepared and single is not None:
        union, wanted = Counter(row for of_rank in rows for row in of_rank), Counter(_rows(single, first))
        if different := max((wanted - union).total(), (union - wanted).total()):
            return (
                "order-differs",
                f"{different} rows of epoch {first.epoch} differ from those of one process",
            )
    return None


def _rows(record: RunRecord, of: LoaderPass) -> list[str]:
    return [
        row
        for batch in record.batches
        if (batch.loader, batch.epoch) == (of.loader, of.epoch)
        for row in batch.rows[: batch.real]
    ]


# 2. Gathered results.


def gathered(records: Records) -> Iterator[Diagnosis]:
    """Find calls of `gather` that return padding, once for each line."""
    calls = {
        call.where: call for call in records[RANKS][0].gathered if call.padding and call.function == "gather"
    }
    for call in calls.values():
        text = f"gather() returned {call.rows} rows of the last batch, {call.padding} of which pad it"
        yield Diagnosis("metric-on-padding", text, call.where)


# 3. Numbers.


def numbers(records: Records) -> Iterator[Diagnosis]:
    """Compare losses, gradients and weights step by step, up to the first difference."""
    ranks, single = records[RANKS], first_of(records, ONE)
    first, shards = ranks[0], by_shard(ranks)
    yield from _of_ranks(ranks)
    if single is not None and first.tied != single.tied and not first.losses:
        lost = [", ".join(names) for names in single.tied if names not in first.tied]
        yield Diagnosis("weights-untied", f"one process has tied {'; '.join(lost) or 'none'}")
    if first.differs_by:
        yield Diagnosis("numbers-not-compared", first.differs_by)
        return
    yield from _between_ranks(ranks)
    if single is None or single.stopped:
        return
    if len(shards) > 1 and (reason := random_numbers(records)):
        yield Diagnosis("numbers-not-compared", reason, first.draws)
        return
    tolerance = tolerance_of(first, single)
    for number, step in enumerate(first.steps[: comparable_steps(first, single)]):
        start = first.steps[number - 1].backwards if number else 0
        if not _same_data(shards, single, start, step.backwards):
            text = (
                f"from step {number + 1} on, the ranks and the single process have different global batches"
            )
            yield Diagnosis("numbers-not-compared", text)
            return
        difference = _compare_step(shards, single, number, start, tolerance)
        if difference is not None:
            yield difference
            return


def _of_ranks(ranks: Sequence[RunRecord]) -> Iterator[Diagnosis]:
    """Find losses of few bits, although prepared models return float32, and BatchNorms of few values."""
    first = ranks[0]
    low = next((backward for backward in first.backwards if backward.dtype in {"float16", "bfloat16"}), None)
    weights = {digest.dtype for step in first.steps for digest in step.weights.values()}
    if low is not None and first.precision in _MIXED and weights <= {"float32", "float64"}:
        yield Diagnosis("loss-in-low-precision", f"the loss has the dtype {low.dtype}", low.where)
    values = {name: min(record.norms.get(name, math.inf) for record in ranks) for name in first.norms}
    if len(by_shard(ranks)) > 1 and values:
        name = min(values, key=values.__getitem__)
        if values[name] < _FEW_VALUES:
            text = f"{name} normalises with only the {values[name]} values of its rank"
            yield Diagnosis("batchnorm-per-rank", text)


def _between_ranks(ranks: Sequence[RunRecord]) -> Iterator[Diagnosis]:
    """Find gradients that ranks have not synchronised."""
    tolerance = tolerance_of(ranks[0])
    for number, steps in enumerate(zip(*(record.steps for record in ranks), strict=False), 1):
        for record, step in zip(ranks[1:], steps[1:], strict=True):
            name = first_difference(step, steps[0], ranks[0].modules, tolerance)
            if name is not None:
                text = f"in step {number}, rank {record.rank} has another gradient of {name} than rank 0"
                yield Diagnosis("gradients-not-synchronised", text)
                return


def random_numbers(records: Records) -> str:
    """Describe random numbers that differ between the ranks and one process; empty if there are none."""
    if records[RANKS][0].draws:
        return "the script draws random numbers in its training loop, and they differ in one process"
    return random_samples(records)


def random_samples(records: Records) -> str:
    """Describe a sample that changes each time it is read; empty if there is none."""
    single = first_of(records, ONE)
    rows = {} if single is None else _rows_by_sample(single)
    for record in records[RANKS]:
        for sample, row in _rows_by_sample(record).items():
            if rows.get(sample, row) != row:
                return f"the dataset returned a different value for sample {sample[2]} than on one process"
    return ""


def _rows_by_sample(record: RunRecord) -> dict[tuple[Any, ...], str]:
    return {
        (batch.loader, batch.epoch, index, batch.shape): row
        for batch in record.batches
        for index, row in zip(batch.indices, batch.rows, strict=False)
    }


def _same_data(ranks: Sequence[RunRecord], single: RunRecord, start: int, stop: int) -> bool:
    """Return whether the global batches of some backward passes are those of one process."""
    for index in range(start, stop):
        if any(index >= len(record.backwards) for record in (*ranks, single)):
            return False
        if any(record.backwards[index].batch < 0 for record in (*ranks, single)):
            return True
        *batches, expected = [record.batches[record.backwards[index].batch] for record in (*ranks, single)]
        are_known = expected.indices and all(batch.indices for batch in batches)
        samples_of = attrgetter("indices" if are_known else "rows")
        if sorted(sample for batch in batches for sample in samples_of(batch)) != sorted(
            samples_of(expected)
        ):
            return False
    return True


def _compare_step(
    ranks: Sequence[RunRecord], single: RunRecord, number: int, start: int, tolerance: float
) -> Diagnosis | None:
    first, step, expected = ranks[0], ranks[0].steps[number], single.steps[number]
    title = f"in step {number + 1}"
    if step.backwards != expected.backwards:
        text = f"{title} come {step.backwards} backward passes before, on one process {expected.backwards}"
        return Diagnosis("windows-differ", text)
    passes = range(start, step.backwards)
    losses = {index: (_loss(ranks, index), _loss([single], index)) for index in passes}
    grown = rounding(tolerance, number)
    of_weights = min(grown, max(tolerance, 1e-2))
    # 1. The weights before the step, which were equal after the one before.
    if number:
        changed = _first_weight(step.before, expected.before, first.steps[number - 1], of_weights)
        if changed is not None:
            text = f"before step {number + 1}, {changed}; after the step before they were equal"
            return Diagnosis("weights-differ", text)
    # 2. The first parameter in the order of execution whose gradient differs.
    name = first_difference(step, expected, first.modules, grown, floor=FLOOR if number else 0.0)
    if name is not None:
        gradient, other = step.gradients.get(name), expected.gradients.get(name)
        if gradient is None or other is None:
            missing = "the ranks have" if gradient is None else "one process has"
            return Diagnosis("unused-parameters", f"{title}, {missing} no gradient for {name}")
        loss, wanted = losses.get(start, (math.nan, math.nan))
        text = (
            f"{title}, the first gradient that differs is that of {name} (module"
            f" {name.rpartition('.')[0] or name}): norm {gradient.norm:.4g}, on one process {other.norm:.4g};"
            f" loss {loss:.6g}, on one process {wanted:.6g}"
        )
        where = first.backwards[start].where if start < len(first.backwards) else ""
        return Diagnosis(_explain(ranks, single, step, expected, passes, grown), text, where)
    # 3. Losses, where the gradients are not compared.
    for index, (loss, other) in losses.items():
        if first.losses and relative(loss, other) > max(tolerance, 5e-3):
            text = f"{title}, the loss is {loss:.6g}, on one process {other:.6g}"
            named = _normalisation(ranks, single, index) or "gradients-differ"
            return Diagnosis(named, text, first.backwards[index].where)
    # 4. The weights after the step.
    changed = _first_weight(step.weights, expected.weights, step, of_weights)
    if changed is not None:
        return Diagnosis("weights-differ", f"after step {number + 1} with equal gradients, {changed}")
    return None


def _first_weight(
    weights: Mapping[str, Digest], expected: Mapping[str, Digest], step: Step, tolerance: float
) -> str | None:
    """Describe the first parameter that differs, unless its gradient in a step was rounding."""
    total = _total(step.gradients)
    for name, digest in weights.items():
        other, gradient = expected.get(name), step.gradients.get(name)
        is_noise = gradient is not None and gradient.norm < 1e-2 * total
        if other is not None and not is_noise and distance(digest, other) > 10 * tolerance:
            return f"{name} has the norm {digest.norm:.6g}, on one process {other.norm:.6g}"
    return None


def _explain(
    ranks: Sequence[RunRecord],
    single: RunRecord,
    step: Step,
    expected: Step,
    passes: Iterable[int],
    tolerance: float,
) -> str:
    """Name a difference of gradients."""
    for index in passes:
        if name := _normalisation(ranks, single, index):
            return name
    if _have_a_factor(step, expected, tolerance):
        return "gradients-scaled"
    return "mask-dropped" if any(_have_other_shapes(ranks, index) for index in passes) else "gradients-differ"


def _normalisation(ranks: Sequence[RunRecord], single: RunRecord, index: int) -> str | None:
    """Name the mean by which the losses of ranks give that of one process, if their plain mean does not."""
    passes, expected = [record.backwards[index] for record in ranks], single.backwards[index]
    if expected.items is not None or expected.batch < 0:
        return None
    gap = abs(_loss(ranks, index) - expected.loss)
    if gap <= 1e-5 * abs(expected.loss):
        return None
    of_single = single.batches[expected.batch].counts
    counts = [record.batches[backward.batch].counts for record, backward in zip(ranks, passes, strict=True)]
    matches: list[str] = []
    for name in of_single:
        weights = [of_rank.get(name, 0.0) for of_rank in counts]
        weighted = math.fsum(weight * one.loss for weight, one in zip(weights, passes, strict=True))
        mean = weighted / sum(weights) if sum(weights) else math.inf
        if abs(mean - expected.loss) < 0.02 * gap + 1e-6 * abs(expected.loss):
            matches.append(name)
    elements = max((count for name, count in of_single.items() if "padding included" in name), default=0.0)
    masked = [name for name in matches if "padding included" not in name and of_single[name] < elements]
    if not matches:
        return None
    return "mask-dropped" if _have_other_shapes(ranks, index) and not masked else "mean-of-means"


def _have_other_shapes(ranks: Sequence[RunRecord], index: int) -> bool:
    return len({record.batches[record.backwards[index].batch].shape for record in ranks}) > 1


def _have_a_factor(step: Step, expected: Step, tolerance: float) -> bool:
    """Return whether all gradients differ by one factor."""
    total = _total(expected.gradients)
    pairs = [
        (digest, other)
        for name, digest in step.gradients.items()
        if digest and (other := expected.gradients.get(name)) and other.norm > 1e-2 * total
    ]
    factor = pairs[0][0].norm / pairs[0][1].norm if pairs else 1.0
    scaled = (
        replace(other, norm=other.norm * factor, values=tuple(value * factor for value in other.values))
        for _, other in pairs
    )
    distances = (distance(digest, other) for (digest, _), other in zip(pairs, scaled, strict=True))
    return factor != 0 and abs(factor - 1) > tolerance and all(far <= 2 * tolerance for far in distances)


def first_difference(
    step: Step, expected: Step, modules: Iterable[str], tolerance: float, *, floor: float = 0.0
) -> str | None:
    """Return the first parameter, in the order of execution, whose gradient differs.

    Differences of gradients below `floor` of the norm of all gradients are related to this part of that norm.
    """
    order = {name: position for position, name in enumerate(modules)}
    names = sorted(
        step.gradients.keys() & expected.gradients.keys(),
        key=lambda name: order.get(name.rpartition(": ")[2].rpartition(".")[0], len(order)),
    )
    total = _total(expected.gradients)
    for name in names:
        gradient, other = step.gradients[name], expected.gradients[name]
        norm = max(gradient.norm if gradient else 0.0, other.norm if other else 0.0)
        if gradient is None or other is None:
            if norm > _NOISE * total:
                return name
        elif norm > max(_NOISE, tolerance / 10) * total:
            share = norm / max(norm, floor * total)
            if share * distance(gradient, other) > tolerance:
                return name
    return None


def _loss(ranks: Sequence[RunRecord], index: int) -> float:
    """Return the loss of one backward pass over all ranks."""
    passes = [record.backwards[index] for record in ranks]
    items = len(passes) if passes[0].items is None else math.fsum(one.items or 0.0 for one in passes)
    return math.fsum(one.loss for one in passes) / (items or 1.0)


def tolerance_of(*records: RunRecord) -> float:
    """Return the relative difference that is rounding in the least precise dtype of these records."""
    steps = [record.steps[0] for record in records if record.steps]
    dtypes = {digest.dtype for step in steps for digest in step.gradients.values() if digest is not None}
    dtypes |= {_MIXED[record.precision] for record in records if record.precision in _MIXED}
    known = (TOLERANCES.get(dtype, TOLERANCES["float32"]) for dtype in dtypes)
    return max(known, default=TOLERANCES["float32"])


def rounding(tolerance: float, number: int) -> float:
    """Return the relative difference of gradients that is rounding in a step, counted from 0."""
    return tolerance * _GROWTH**number


def comparable_steps(ranks: RunRecord, single: RunRecord) -> int:
    """Return the number of steps in which a different gradient is distinguishable from a rounded one."""
    tolerance = tolerance_of(ranks, single)
    steps = min(len(ranks.steps), len(single.steps))
    return sum(rounding(tolerance, number) <= TOLERANCES["float8"] for number in range(steps))


def distance(first: Digest, second: Digest) -> float:
    """Return the relative difference of two tensors in brief.

    Example:
        >>> one = Digest(norm=5.0, values=(7.0, 3.0, 4.0), dtype="float32")
        >>> distance(one, one), distance(one, Digest(norm=0.0, values=(0.0, 0.0, 0.0), dtype="float32"))
        (0.0, 1.0)
    """
    norm = max(first.norm, second.norm)
    if not norm:
        return 0.0
    if len(first.values) != len(second.values):
        return math.inf
    own, other = first.values[1:], second.values[1:]
    sampled = max(math.hypot(*own), math.hypot(*other), 1e-3 * norm)
    return max(abs(first.norm - second.norm) / norm, math.dist(own, other) / sampled)


def relative(first: float, second: float) -> float:
    """Return the relative difference of two numbers."""
    largest = max(abs(first), abs(second))
    return abs(first - second) / largest if largest else 0.0


def _total(gradients: Mapping[str, Digest | None]) -> float:
    return math.hypot(*(digest.norm for digest in gradients.values() if digest is not None))


# 4. Clocks.


def clocks(records: Records) -> Iterator[Diagnosis]:
    """Compare learning rates by samples seen, and find optimizers and clipping outside of the library's."""
    ranks, plain = by_shard(records[RANKS]), first_of(records, PLAIN)
    first = ranks[0]
    unprepared = next((step for step in first.steps if not step.is_prepared), None)
    if unprepared is not None:
        text = f"{unprepared.name} steps after {unprepared.backwards} backward passes, and was not prepared"
        yield Diagnosis("optimizer-not-prepared", text)
    if plain is not None and not plain.stopped and first.clock != "update":
        yield from _rates(ranks, plain)
    for name, where in first.events:
        yield Diagnosis(name, "torch.nn.utils.clip_grad_norm_ was called", where)


def _rates(ranks: Sequence[RunRecord], plain: RunRecord) -> Iterator[Diagnosis]:
    """Compare learning rates after equally many samples, unless they follow from metrics."""
    schedules = ranks[0].schedules
    if not schedules or "ReduceLROnPlateau" in schedules:
        return
    expected = {_samples_before([plain], step): step.rates for step in _steps_of_first_epoch(plain)}
    for number, step in enumerate(_steps_of_first_epoch(ranks[0]), 1):
        samples = _samples_before(ranks, step)
        pairs = zip(step.rates, expected.get(samples, ()), strict=False)
        pair = next((pair for pair in pairs if relative(*pair) > 1e-6), None)
        if pair is not None:
            is_prepared = any(schedules.values())
            text = (
                f"in step {number}, after {samples} samples, the learning rate is {pair[0]:.4g}, on one"
                f" process {pair[1]:.4g}"
            )
            yield Diagnosis("schedule-per-process" if is_prepared else "scheduler-not-prepared", text)
            return


def _steps_of_first_epoch(record: RunRecord) -> Iterator[Step]:
    """Yield the steps of the first optimizer before passes end early, after which samples and steps part."""
    for step in record.steps:
        batch = record.backwards[step.backwards - 1].batch if step.backwards else -1
        if step.optimizer == 0 and batch >= 0 and record.batches[batch].epoch == 0:
            yield step


def _samples_before(ranks: Sequence[RunRecord], step: Step) -> int:
    """Return how many samples all ranks had seen in the steps before."""
    before = [earlier.backwards for earlier in ranks[0].steps if earlier.backwards < step.backwards]
    return len(_samples_of(ranks, 0, max(before, default=0)))


def _samples_of(ranks: Sequence[RunRecord], start: int, stop: int) -> list[Any]:
    """Return the samples of some backward passes, by index or by content."""
    return [
        sample
        for record in ranks
        for backward in record.backwards[start:stop]
        if backward.batch >= 0
        for sample in record.batches[backward.batch].samples
    ]


# 5. Waiting.


def waiting(records: Records) -> Iterator[Diagnosis]:
    """Find ranks that wait for another rank or for the device, and gradients that are averaged too often."""
    ranks = records[RANKS]
    first, backwards = ranks[0], ranks[0].backwards
    if not first.steps or not backwards:
        return
    # 1. A rank that takes longer before its backward passes.
    seconds = [sorted(backward.seconds for backward in record.backwards[1:]) for record in ranks]
    medians = [of_rank[len(of_rank) // 2] for of_rank in seconds if of_rank]
    if len(medians) == len(ranks) > 1:
        slowest, fastest = max(medians), min(medians)
        if slowest > max(_SLOW * fastest, fastest + _SLOW_SECONDS):
            text = (
                f"rank {medians.index(slowest)} takes {slowest:.2f} s for data and forward pass, the fastest"
                f" rank {fastest:.2f} s"
            )
            yield Diagnosis("rank-slower", text)
    # 2. Gradients that are averaged more than once for a step.
    steps = len({step.backwards for step in first.steps})
    reduced = sum(backward.reduces for backward in backwards[: first.steps[-1].backwards])
    if reduced > steps:
        yield Diagnosis(
            "reduced-too-often", f"{reduced} all-reduces of {first.nbytes} bytes in {steps} steps"
        )
    # 3. Values that the host waits for in every micro-batch.
    for where, count in first.waits.items():
        if count >= len(backwards):
            text = f"item() waits for the device {count} times in {len(backwards)} micro-batches"
            yield Diagnosis("host-waits", text, where)


# 6. Resume.


def resume(records: Records) -> Iterator[Diagnosis]:
    """Compare resumed runs with the undisturbed one, from the step after the checkpoint on."""
    ranks = records[RANKS]
    for run in (RESUMED, RESCALED):
        again = records.get(run, ())
        if again and ranks[0].steps and not any(record.stopped for record in again):
            difference = _compare_resumed(records, by_shard(again) if run == RESUMED else again)
            if difference is not None:
                yield Diagnosis(difference[0], f"{_TITLES[run]}, {difference[1]}")


def _compare_resumed(records: Records, again: Sequence[RunRecord]) -> tuple[str, str] | None:
    """Name and describe the first difference of a resumed run."""
    ranks = by_shard(records[RANKS])
    first, start = ranks[0], ranks[0].steps[0].backwards
    later = (step for step in first.steps if step.backwards > start)
    for number, (step, expected) in enumerate(zip(again[0].steps, later, strict=False), 2):
        wanted, samples = _samples_of(ranks, start, expected.backwards), _samples_of(again, 0, step.backwards)
        if sorted(map(str, wanted)) != sorted(map(str, samples)):
            text = f"step {number} has different samples than in the uninterrupted run"
            return "resume-other-samples", text
        if any(relative(*pair) > 1e-6 for pair in zip(step.rates, expected.rates, strict=False)):
            rates = f"{step.rates[0]:.4g}, uninterrupted {expected.rates[0]:.4g}"
            return "resume-other-rate", f"the learning rate of step {number} is {rates}"
        if not random_samples(records) and number <= comparable_steps(first, first):
            tolerance = rounding(tolerance_of(first), number - 1)
            name = first_difference(step, expected, first.modules, tolerance, floor=FLOOR)
            if name is not None:
                return "resume-other-numbers", f"the gradient of {name} differs in step {number}"
    return None


CHECKS: Mapping[str, Callable[[Records], Iterator[Diagnosis]]] = {
    "data": data,
    "gathered": gathered,
    "numbers": numbers,
    "clocks": clocks,
    "waiting": waiting,
    "resume": resume,
}
"""The comparisons by name."""
