"""Compare the records of a run on ranks with those of one process. Pure functions; nothing imports torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from accel_inspect.doctor.causes import Diagnosis
from accel_inspect.doctor.compare_numbers import (
    FLOOR,
    comparable_steps,
    first_difference,
    numbers,
    random_numbers,
    random_samples,
    relative,
    rounding,
    tolerance_of,
)
from accel_inspect.doctor.record import (
    ONE,
    PLAIN,
    RANKS,
    RESCALED,
    RESUMED,
    LoaderPass,
    Records,
    RunRecord,
    Step,
    by_shard,
    first_of,
    same_pass,
)


def compare(records: Records) -> list[Diagnosis]:
    """Compare the runs. Returns the diagnoses of each check, or one that reports that all is equal."""
    stopped = [*stops(records)]
    if any(record.stopped for record in records[RANKS]):
        return [*stopped, *data(records), *clocks(records)]
    checks = {
        "data": data,
        "gathered": gathered,
        "numbers": numbers,
        "clocks": clocks,
        "waiting": waiting,
        "resume": resume,
    }
    diagnoses = stopped
    for name, check in checks.items():
        is_other = bool(records[RANKS][0].differs_by or random_numbers(records)) or any(
            item.differs or item.name == "numbers-not-compared" for item in diagnoses
        )
        if name == "resume" and is_other:
            records = {run: of_run for run, of_run in records.items() if run != RESCALED}
        of_check = [*check(records)]
        diagnoses += of_check
        if not any(item.differs or item.name == "numbers-not-compared" for item in of_check):
            text = SUMMARIES[name](records)
            if text:
                diagnoses.append(Diagnosis(name, "", text))
    return diagnoses


def stops(records: Records) -> Iterator[Diagnosis]:
    """Yield the reasons why scripts stopped early."""
    for run, of_run in records.items():
        if run in {RESUMED, RESCALED} and any(record.stopped for record in records[RANKS]):
            continue  # there is no checkpoint
        if run == RESCALED and any(record.stopped for record in records.get(ONE, ())):
            continue  # the script does not run on one process
        stopped = [record for record in of_run if record.stopped]
        if not stopped:
            continue
        first = next((record for record in stopped if "has not ended" not in record.stopped), stopped[0])
        text = f"rank {first.rank}: {first.stopped}" if run == RANKS else f"{_TITLES[run]}: {first.stopped}"
        if run != RANKS:
            name = "one-process-stopped" if run in {ONE, PLAIN} else "resume-stopped"
        elif "finished reduction" in first.stopped:
            name = "unused-parameters"
        else:
            name = "rank-stopped"
        yield Diagnosis("run", name, text)


_TITLES = {
    ONE: "on one process with the batches of all ranks",
    PLAIN: "on one process",
    RESUMED: "resumed on the same number of ranks",
    RESCALED: "resumed on one process",
}


# 1. Data.


def data(records: Records) -> Iterator[Diagnosis]:
    """Compare the samples that ranks read: each sample once, in the order of one process."""
    ranks = by_shard(records[RANKS])
    single = first_of(records, ONE)
    for first in ranks[0].passes:
        passes = [of_rank for record in ranks if (of_rank := same_pass(record, first)) is not None]
        if len(passes) < len(ranks):
            if not any(record.stopped for record in ranks):
                yield Diagnosis(
                    "data",
                    "uneven-batches",
                    f"{len(passes)} of {len(ranks)} ranks iterate over it in epoch {first.epoch}",
                    first.where,
                )
            continue
        if len(ranks) > 1:
            yield from _compare_pass(
                ranks, passes, None if single is None else same_pass(single, first), single
            )
        if first.states and first.epoch == 0:
            yield Diagnosis(
                "data",
                "generator-in-workers",
                f"each worker has its own copy of the data set's {', '.join(first.states)}",
                first.where,
            )
    yield from _epochs(ranks[0])


def _compare_pass(
    ranks: Sequence[RunRecord],
    passes: Sequence[LoaderPass],
    single: LoaderPass | None,
    record: RunRecord | None,
) -> Iterator[Diagnosis]:
    first = passes[0]
    plans = [of_rank.plan for of_rank in passes]
    if first.plan is None or None in plans:
        yield from _compare_read(ranks, first, record)
        return
    lengths = [len(plan) for plan in plans if plan is not None]
    if len(set(lengths)) > 1:
        yield Diagnosis(
            "data", "uneven-batches", f"ranks have {', '.join(map(str, lengths))} batches", first.where
        )
        return
    if single is None or single.plan is None:
        return
    union = Counter(sample for plan in plans if plan for batch in plan for sample in batch)
    wanted = Counter(sample for batch in single.plan for sample in batch)
    missing, extra = wanted - union, union - wanted
    num_missing, num_extra = missing.total(), extra.total()
    if missing or num_extra >= len(ranks):
        name = "sharded-twice" if not num_extra else "other-samples-per-rank" if missing else "samples-twice"
        text = (
            f"of {wanted.total()} samples of epoch {first.epoch}, {num_missing} are read by no rank, "
            f"and {num_extra} are read too often"
        )
        yield Diagnosis("data", name, text, first.where)
        return
    for number, together in enumerate(zip(*plans, strict=True)):
        if len(plans[0] or ()) != len(single.plan):
            break  # the script has chosen another batch size
        if extra or sorted(sample for batch in together for sample in batch) == sorted(single.plan[number]):
            continue
        text = f"batch {number} of epoch {first.epoch} has different samples than in one process"
        yield Diagnosis("data", "order-differs", text, first.where)
        return


def _compare_read(
    ranks: Sequence[RunRecord], first: LoaderPass, single: RunRecord | None
) -> Iterator[Diagnosis]:
    """Compare the rows that were read, where no sampler says which samples they are."""
    rows = [_rows(record, first) for record in ranks]
    is_training = any(
        backward.batch >= 0 and ranks[0].batches[backward.batch].loader == first.loader
        for backward in ranks[0].backwards
    )
    if not is_training or not rows[0]:
        return
    if all(of_rank == rows[0] for of_rank in rows[1:]):
        name = "stream-read-in-full" if first.is_prepared else "loader-not-prepared"
        text = f"all {len(ranks)} ranks read the same {len(rows[0])} rows in epoch {first.epoch}"
        yield Diagnosis("data", name, text, first.where)
        return
    if not first.is_prepared or single is None:
        return
    union = Counter(row for of_rank in rows for row in of_rank)
    wanted = Counter(_rows(single, first))
    if union != wanted:
        different = max((wanted - union).total(), (union - wanted).total())
        text = f"{different} rows of epoch {first.epoch} differ from those of one process"
        yield Diagnosis("data", "order-differs", text, first.where)


def _rows(record: RunRecord, of: LoaderPass) -> list[Any]:
    return [
        sample
        for batch in record.batches
        if (batch.loader, batch.epoch) == (of.loader, of.epoch)
        for sample in batch.rows[: batch.real]
    ]


def _epochs(record: RunRecord) -> Iterator[Diagnosis]:
    """Find loaders that shuffle, and read the same order in two epochs."""
    for first in record.passes:
        second = next(
            (later for later in record.passes if (later.loader, later.epoch) == (first.loader, 1)), None
        )
        if first.epoch or second is None or not first.shuffles:
            continue
        orders = [of_epoch.plan or tuple(_rows(record, of_epoch)) for of_epoch in (first, second)]
        if len(orders[0]) > 1 and orders[0] == orders[1]:
            text = "two epochs have the same order although the sampler shuffles"
            yield Diagnosis("data", "epoch-not-set", text, first.where)


# 2. Gathered results.


def gathered(records: Records) -> Iterator[Diagnosis]:
    """Compare what `gather` and `gather_for_metrics` returned."""
    ranks, single = records[RANKS], first_of(records, ONE)
    seen: set[str] = set()
    for number, call in enumerate(ranks[0].gathered):
        if call.where in seen:
            continue
        if call.padding and call.function == "gather":
            seen.add(call.where)
            text = f"gather() returned {call.rows} rows of the last batch, {call.padding} of which pad it"
            yield Diagnosis("gathered", "metric-on-padding", text, call.where)
        elif single is not None and call.function == "gather_for_metrics" and number < len(single.gathered):
            expected = single.gathered[number].rows
            if call.rows != expected and single.gathered[number].where == call.where:
                seen.add(call.where)
                text = f"gather_for_metrics() returned {call.rows} rows, on one process {expected}"
                yield Diagnosis("gathered", "gathered-rows-differ", text, call.where)


# 3. Clocks.


def clocks(records: Records) -> Iterator[Diagnosis]:
    """Compare learning rates by samples seen, and the steps of optimizers and schedules."""
    ranks, single, plain = records[RANKS], first_of(records, ONE), first_of(records, PLAIN)
    unprepared = next((step for step in ranks[0].steps if not step.is_prepared), None)
    if unprepared is not None:
        text = f"{unprepared.name} steps after {unprepared.backwards} backward passes, and was not prepared"
        yield Diagnosis("clocks", "optimizer-not-prepared", text)
    counts = [len(record.steps) for record in ranks]
    if len(set(counts)) > 1 and not any(record.stopped for record in ranks):
        text = f"ranks made {', '.join(map(str, counts))} optimizer steps"
        yield Diagnosis("clocks", "steps-differ", text)
    elif (
        single is not None
        and not (single.stopped or ranks[0].stopped)
        and counts[0] != len(single.steps)
        and all(map(_have_equal_lengths, ranks[0].passes, single.passes))
    ):
        text = f"each rank made {counts[0]} optimizer steps, one process {len(single.steps)}"
        yield Diagnosis("clocks", "steps-differ", text)
    if plain is not None and not plain.stopped:
        yield from _rates(by_shard(ranks), plain)
    for name, where in ranks[0].events:
        yield Diagnosis("clocks", name, "torch.nn.utils.clip_grad_norm_ was called", where)


def _have_equal_lengths(first: LoaderPass, second: LoaderPass) -> bool:
    """Return whether two passes have equally many batches; a script may choose the size of batches."""
    return len(first.plan or ()) == len(second.plan or ())


def _rates(ranks: Sequence[RunRecord], plain: RunRecord) -> Iterator[Diagnosis]:
    """Compare learning rates after equally many samples."""
    schedules = {schedule.name for step in ranks[0].steps for schedule in step.schedules}
    if ranks[0].clock == "update" or "ReduceLROnPlateau" in schedules or not schedules:
        return
    expected = {_samples_before([plain], step): step.rates for step in _steps_of_first_epoch(plain)}
    for number, step in enumerate(_steps_of_first_epoch(ranks[0])):
        samples = _samples_before(ranks, step)
        rates = expected.get(samples)
        if rates is None or len(rates) != len(step.rates):
            continue
        pair = next((pair for pair in zip(step.rates, rates, strict=True) if relative(*pair) > 1e-6), None)
        if pair is None:
            continue
        is_prepared = any(schedule.is_prepared for schedule in step.schedules)
        text = (
            f"in step {number + 1}, after {samples} samples, the learning rate is {pair[0]:.4g}, on one"
            f" process {pair[1]:.4g}"
        )
        name = "schedule-per-process" if is_prepared else "scheduler-not-prepared"
        yield Diagnosis("clocks", name, text)
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
    stop = max(before, default=0)
    return sum(
        record.batches[backward.batch].real
        for record in ranks
        for backward in record.backwards[:stop]
        if backward.batch >= 0
    )


# 4. Waiting.

_SLOW = 2.0
"""How many times longer than the fastest rank a straggler takes, if that is at least `_SLOW_SECONDS`."""

_SLOW_SECONDS = 0.05


def waiting(records: Records) -> Iterator[Diagnosis]:
    """Find ranks that wait for another rank or for the device, and gradients that are averaged too often."""
    ranks = records[RANKS]
    backwards = ranks[0].backwards
    if not ranks[0].steps or not backwards:
        return
    # 1. A rank that takes longer before its backward passes.
    seconds = [sorted(backward.seconds for backward in record.backwards[1:]) for record in ranks]
    medians = [of_rank[len(of_rank) // 2] for of_rank in seconds if of_rank]
    if len(medians) == len(ranks) > 1:
        slowest = medians.index(max(medians))
        if medians[slowest] > max(_SLOW * min(medians), min(medians) + _SLOW_SECONDS):
            text = (
                f"rank {slowest} takes {medians[slowest]:.2f} s for data and forward pass, the fastest rank"
                f" {min(medians):.2f} s"
            )
            yield Diagnosis("waiting", "rank-slower", text)
    # 2. Gradients that are averaged more than once for a step.
    steps = len({step.backwards for step in ranks[0].steps})
    reduced = sum(backward.reduces for backward in backwards[: ranks[0].steps[-1].backwards])
    if reduced > steps:
        text = f"{reduced} all-reduces of {ranks[0].nbytes} bytes in {steps} steps"
        yield Diagnosis("waiting", "reduced-too-often", text)
    # 3. Values that the host waits for in every micro-batch.
    for where, count in ranks[0].waits.items():
        if count >= len(backwards):
            text = f"item() waits for the device {count} times in {len(backwards)} micro-batches"
            yield Diagnosis("waiting", "host-waits", text, where)


# 5. Resume.


def resume(records: Records) -> Iterator[Diagnosis]:
    """Compare resumed runs with the undisturbed one, from the step after the checkpoint on."""
    ranks = records[RANKS]
    if RESUMED not in records or not ranks[0].steps:
        return
    start = ranks[0].steps[0].backwards
    later = [step for step in ranks[0].steps if step.backwards > start]
    for run in (RESUMED, RESCALED):
        if run not in records or any(record.stopped for record in records[run]):
            continue
        resumed = records[run]
        undisturbed, again = by_shard(ranks), by_shard(resumed) if run == RESUMED else resumed
        title = _TITLES[run]
        for number, step in enumerate(resumed[0].steps[: len(later)]):
            expected = later[number]
            wanted = _samples_of(undisturbed, start, expected.backwards)
            samples = _samples_of(again, 0, step.backwards)
            if sorted(map(str, wanted)) != sorted(map(str, samples)):
                text = f"{title}, step {number + 2} has different samples than in the uninterrupted run"
                yield Diagnosis("resume", "resume-other-samples", text)
                break
            if any(relative(*pair) > 1e-6 for pair in zip(step.rates, expected.rates, strict=False)):
                rates = f"{step.rates[0]:.4g}, uninterrupted {expected.rates[0]:.4g}"
                text = f"{title}, the learning rate of step {number + 2} is {rates}"
                yield Diagnosis("resume", "resume-other-rate", text)
                break
            if random_samples(records) or number + 1 >= comparable_steps(ranks[0], ranks[0]):
                continue
            tolerance = rounding(tolerance_of(ranks[0]), number + 1)
            name = first_difference(step, expected, ranks[0].modules, tolerance, floor=FLOOR)
            if name is not None:
                text = f"{title}, the gradient of {name} differs in step {number + 2}"
                yield Diagnosis("resume", "resume-other-numbers", text)
                break


def _samples_of(ranks: Sequence[RunRecord], start: int, stop: int) -> list[Any]:
    return [
        sample
        for record in ranks
        for backward in record.backwards[start:stop]
        if backward.batch >= 0
        for sample in record.batches[backward.batch].samples
    ]


# 6. Summaries of what is equal.


def _data_summary(records: Records) -> str:
    passes = [of_loader for of_loader in records[RANKS][0].passes if of_loader.is_prepared]
    samples = sum(batch.real for record in by_shard(records[RANKS]) for batch in record.batches)
    return f"{samples} samples in {len(passes)} passes, as on one process" if passes else ""


def _numbers_summary(records: Records) -> str:
    ranks, single = records[RANKS], first_of(records, ONE)
    is_other = ranks[0].differs_by or random_numbers(records)
    if single is None or single.stopped or not ranks[0].steps or is_other:
        return ""
    what = "losses" if ranks[0].losses else "losses, gradients and weights"
    steps = comparable_steps(ranks[0], single)
    return f"{what} of {steps} optimizer steps, to {tolerance_of(ranks[0], single):.0e}"


def _clocks_summary(records: Records) -> str:
    steps = records[RANKS][0].steps
    if not steps:
        return ""
    streams = {record.steps[0].random for record in records[RANKS] if record.steps}
    random = "the same random stream on all ranks" if len(streams) == 1 else "a random stream for each rank"
    return f"{len(steps)} optimizer steps and their learning rates; {random}"


SUMMARIES: Mapping[str, Any] = {
    "data": _data_summary,
    "gathered": lambda records: (
        f"{len(records[RANKS][0].gathered)} calls of gather and gather_for_metrics"
        if records[RANKS][0].gathered
        else ""
    ),
    "numbers": _numbers_summary,
    "clocks": _clocks_summary,
    "waiting": lambda records: (
        f"one all-reduce of {records[RANKS][0].nbytes} bytes for each step"
        if any(backward.reduces for backward in records[RANKS][0].backwards)
        else ""
    ),
    "resume": lambda records: (
        "the steps after a checkpoint, on as many ranks and on one process" if RESUMED in records else ""
    ),
}
"""What is said of a check that finds nothing."""
