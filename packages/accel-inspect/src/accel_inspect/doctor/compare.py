"""Compare the records of a run on ranks with those of one process. Pure functions; nothing imports torch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from operator import attrgetter, mul
from typing import Any

from accel_inspect.doctor.causes import Diagnosis
from accel_inspect.doctor.record import (
    ONE,
    PLAIN,
    RANKS,
    RESUMED,
    Digest,
    LoaderPass,
    ReadBatch,
    Records,
    RunRecord,
    Step,
)

TOLERANCES = {"float64": 1e-9, "float32": 5e-4, "float16": 2e-2, "bfloat16": 5e-2, "float8": 0.25}
"""Relative differences that are rounding, by dtype; in FP8 each rank scales by its own largest value, too."""

_MIXED = {"fp16": "float16", "bf16": "bfloat16", "fp8": "float8"}
_NOISE = 1e-5  # norm of a gradient, relative to that of all, below which it is rounding
_GROWTH = 5  # of the rounding of gradients with each step: the weights before it are rounded, too
FLOOR = 0.1
"""Part of the norm of all gradients; a ReLU that rounds to the other side changes small gradients most."""


def compare(records: Records) -> list[Diagnosis]:
    """Compare the runs. Returns the diagnoses of each check, or one that reports that all is equal."""
    ranks = records[RANKS]
    has_stopped = any(record.stopped for record in ranks)
    diagnoses = [*stops(records)]
    for name, check in CHECKS.items():
        if has_stopped and name not in {"data", "clocks"}:
            continue
        own = [
            Diagnosis(kind, text, where) for (of, kind, where), text in ranks[0].found.items() if of == name
        ]
        found = [*own, *check(records)]
        if not (found or has_stopped) and (text := _equal(name, records)):
            found.append(Diagnosis("", text))
        diagnoses += [made._replace(check=name) for made in found]
    return diagnoses


def _equal(name: str, records: Records) -> str:
    """Describe what a check has found to be equal; empty if the runs have nothing of the kind."""
    first, single = records[RANKS][0], _one(records)
    if name == "data" and (passes := sum(of_loader.is_prepared for of_loader in first.passes)):
        samples = sum(batch.real for record in by_shard(records[RANKS]) for batch in record.batches)
        return f"{samples} samples in {passes} passes, as on one process"
    if name == "gathered" and first.gathered:
        return f"{first.gathered} calls of gather and gather_for_metrics"
    if name == "numbers" and first.steps and single is not None and not random_numbers(records):
        what = "losses" if first.losses else "losses, gradients and weights"
        steps, tolerance = comparable_steps(first, single), tolerance_of(first, single)
        return f"{what} of {steps} optimizer steps, to {tolerance:.0e}"
    if name == "clocks" and first.steps:
        return f"{len(first.steps)} optimizer steps and their learning rates"
    return "the steps after a checkpoint" if name == "resume" and RESUMED in records else ""


def _one(records: Records, run: str = ONE) -> RunRecord | None:
    """Return the record of a run of one process, unless it is absent or has stopped early."""
    return next((record for record in records.get(run, ()) if not record.stopped), None)


_STOPPED = {
    RANKS: ("rank-stopped", "rank {}"),
    ONE: ("one-process-stopped", "on one process with the batches of all ranks"),
    PLAIN: ("one-process-stopped", "on one process"),
    RESUMED: ("resume-stopped", "resumed"),
}


def by_shard(ranks: Sequence[RunRecord]) -> list[RunRecord]:
    """Return one rank of each data shard."""
    return [*{record.shard: record for record in reversed(ranks)}.values()][::-1]


def stops(records: Records) -> Iterator[Diagnosis]:
    """Yield the reasons why scripts stopped early."""
    stopped = {run: [record for record in of_run if record.stopped] for run, of_run in records.items()}
    for run, of_run in stopped.items():
        if of_run and not (run == RESUMED and stopped[RANKS]):
            first = next((record for record in of_run if "has not ended" not in record.stopped), of_run[0])
            name, title = _STOPPED[run]
            if run == RANKS and "finished reduction" in first.stopped:
                name = "unused-parameters"
            yield Diagnosis(name, f"{title.format(first.rank)}: {first.stopped}", check="run")


# 1. Data.


def data(records: Records) -> Iterator[Diagnosis]:
    """Compare the samples that ranks read: each sample once, in the order of one process."""
    ranks, single = by_shard(records[RANKS]), next(iter(records.get(ONE, ())), None)
    for first in ranks[0].passes:
        passes = [same for record in ranks if (same := _pass_of(record, first.loader, first.epoch))]
        if len(passes) < len(ranks):
            if not any(record.stopped for record in ranks):
                text = f"{len(passes)} of {len(ranks)} ranks iterate over it in epoch {first.epoch}"
                yield Diagnosis("uneven-batches", text, first.where)
            continue
        if len(ranks) > 1 and (difference := _compare_pass(ranks, passes, single)):
            yield Diagnosis(*difference, first.where)
        second = _pass_of(ranks[0], first.loader, 1) if first.epoch == 0 and first.shuffles else None
        if second is not None:
            orders = [of_epoch.plan or tuple(_rows(ranks[0], of_epoch)) for of_epoch in (first, second)]
            if len(orders[0]) > 1 and orders[0] == orders[1]:
                text = "two epochs have the same order although the sampler shuffles"
                yield Diagnosis("epoch-not-set", text, first.where)


def _pass_of(record: RunRecord, loader: int, epoch: int) -> LoaderPass | None:
    return next((own for own in record.passes if (own.loader, own.epoch) == (loader, epoch)), None)


def _compare_pass(
    ranks: Sequence[RunRecord], passes: Sequence[LoaderPass], single: RunRecord | None
) -> tuple[str, str] | None:
    """Name and describe how a pass of the ranks differs from that of one process."""
    first = passes[0]
    plans = [of_rank.plan for of_rank in passes if of_rank.plan is not None]
    if len(plans) < len(passes):
        return _compare_read(ranks, first, single)
    if len({*map(len, plans)}) > 1:
        return "uneven-batches", f"ranks have {', '.join(str(len(plan)) for plan in plans)} batches"
    alone = None if single is None else _pass_of(single, first.loader, first.epoch)
    if alone is None or alone.plan is None:
        return None
    union, wanted = (Counter(chain.from_iterable(plan)) for plan in (chain.from_iterable(plans), alone.plan))
    missing, extra = (wanted - union).total(), (union - wanted).total()
    if missing or extra >= len(ranks):
        return "other-samples-per-rank" if extra else "sharded-twice", (
            f"of {wanted.total()} samples of epoch {first.epoch}, {missing} are read by no rank, "
            f"and {extra} are read too often"
        )
    if extra or len(plans[0]) != len(alone.plan):
        return None  # the script has chosen another batch size
    for number, (*together, expected) in enumerate(zip(*plans, alone.plan, strict=True)):
        if sorted(chain.from_iterable(together)) != sorted(expected):
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
    if rows.count(rows[0]) == len(rows):
        name = "stream-read-in-full" if first.is_prepared else "loader-not-prepared"
        return name, f"all {len(ranks)} ranks read the same {len(rows[0])} rows in epoch {first.epoch}"
    if first.is_prepared and single is not None:
        union, wanted = Counter(chain.from_iterable(rows)), Counter(_rows(single, first))
        if different := max((wanted - union).total(), (union - wanted).total()):
            text = f"{different} rows of epoch {first.epoch} differ from those of one process"
            return "order-differs", text
    return None


def _rows(record: RunRecord, of: LoaderPass) -> list[str]:
    batches = (b for b in record.batches if (b.loader, b.epoch) == (of.loader, of.epoch))
    return [row for batch in batches for row in batch.rows[: batch.real]]


# 2. Numbers.


def numbers(records: Records) -> Iterator[Diagnosis]:
    """Compare losses, gradients and weights step by step, up to the first difference."""
    ranks, single = records[RANKS], _one(records)
    first, shards = ranks[0], by_shard(ranks)
    if single is not None and first.tied != single.tied and not first.losses:
        lost = [", ".join(names) for names in single.tied if names not in first.tied]
        yield Diagnosis("weights-untied", f"one process has tied {'; '.join(lost) or 'none'}")
    if first.differs_by:
        yield Diagnosis("numbers-not-compared", first.differs_by)
        return
    yield from _between_ranks(ranks)
    if single is None:
        return
    if len(shards) > 1 and (reason := random_numbers(records)):
        yield Diagnosis("numbers-not-compared", reason, first.draws)
        return
    tolerance, start = tolerance_of(first, single), 0
    for number, step in enumerate(first.steps[: comparable_steps(first, single)]):
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
        start = step.backwards


def _between_ranks(ranks: Sequence[RunRecord]) -> Iterator[Diagnosis]:
    """Find the first gradient that ranks have not synchronised."""
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
    rows: dict[Any, str] = {}
    for record in (*records.get(ONE, ()), *records[RANKS]):
        for batch in record.batches:
            for index, row in zip(batch.indices, batch.rows, strict=False):
                if rows.setdefault((batch.loader, batch.epoch, index, batch.shape), row) != row:
                    return f"the dataset returned a different value for sample {index} than on one process"
    return ""


def _same_data(ranks: Sequence[RunRecord], single: RunRecord, start: int, stop: int) -> bool:
    """Return whether the global batches of some backward passes are those of one process."""
    everyone = (*ranks, single)
    for index in range(start, stop):
        if any(index >= len(record.backwards) for record in everyone):
            return False
        if any(record.backwards[index].batch < 0 for record in everyone):
            return True
        batches = _read(everyone, index)
        samples_of = attrgetter("indices" if all(batch.indices for batch in batches) else "rows")
        *read, expected = map(samples_of, batches)
        if sorted(chain.from_iterable(read)) != sorted(expected):
            return False
    return True


def _read(ranks: Iterable[RunRecord], index: int) -> list[ReadBatch]:
    """Return the batches of one backward pass."""
    return [record.batches[record.backwards[index].batch] for record in ranks]


def _compare_step(
    ranks: Sequence[RunRecord], single: RunRecord, number: int, start: int, tolerance: float
) -> Diagnosis | None:
    first, step, expected = ranks[0], ranks[0].steps[number], single.steps[number]
    title = f"in step {number + 1}"
    if step.backwards != expected.backwards:
        text = f"{title} come {step.backwards} backward passes before, on one process {expected.backwards}"
        return Diagnosis("windows-differ", text)
    passes = range(start, step.backwards)
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
        gradient, other = step.gradients[name], expected.gradients[name]
        if gradient is None or other is None:
            missing = "the ranks have" if gradient is None else "one process has"
            return Diagnosis("unused-parameters", f"{title}, {missing} no gradient for {name}")
        text = (
            f"{title}, the first gradient that differs is that of {name} (module"
            f" {name.rpartition('.')[0] or name}): norm {gradient.norm:.4g}, on one process {other.norm:.4g}"
        )
        if not passes:
            return Diagnosis("gradients-differ", text)
        text += f"; loss {_loss(ranks, start):.6g}, on one process {_loss([single], start):.6g}"
        named = next(filter(None, (_normalisation(ranks, single, index) for index in passes)), None)
        if named is None and _have_a_factor(step, expected, grown):
            named = "gradients-scaled"
        elif named is None:
            is_padded = any(_have_other_shapes(ranks, index) for index in passes)
            named = "mask-dropped" if is_padded else "gradients-differ"
        return Diagnosis(named, text, first.backwards[start].where)
    # 3. Losses, where the gradients are not compared.
    for index in passes if first.losses else ():
        loss, other = _loss(ranks, index), _loss([single], index)
        if relative(loss, other) > max(tolerance, 5e-3):
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


def _normalisation(ranks: Sequence[RunRecord], single: RunRecord, index: int) -> str | None:
    """Name the mean by which the losses of ranks give that of one process, if their plain mean does not."""
    expected = single.backwards[index]
    if expected.items is not None or expected.batch < 0:
        return None
    gap, rounded = abs(_loss(ranks, index) - expected.loss), 1e-6 * abs(expected.loss)
    if gap <= 10 * rounded:
        return None
    batches, counts = _read(ranks, index), single.batches[expected.batch].counts
    losses, matches = [record.backwards[index].loss for record in ranks], list[str]()
    for name in counts:
        weights = [batch.counts.get(name, 0.0) for batch in batches]
        mean = math.fsum(map(mul, weights, losses)) / sum(weights) if sum(weights) else math.inf
        if abs(mean - expected.loss) < 0.02 * gap + rounded:
            matches.append(name)
    elements = max((count for name, count in counts.items() if "padding included" in name), default=0.0)
    is_masked = any("padding included" not in name and counts[name] < elements for name in matches)
    if not matches:
        return None
    return "mask-dropped" if _have_other_shapes(ranks, index) and not is_masked else "mean-of-means"


def _have_other_shapes(ranks: Sequence[RunRecord], index: int) -> bool:
    return len({batch.shape for batch in _read(ranks, index)}) > 1


def _have_a_factor(step: Step, expected: Step, tolerance: float) -> bool:
    """Return whether all gradients differ by one factor."""
    total = _total(expected.gradients)
    pairs = [
        (digest, other)
        for name, digest in step.gradients.items()
        if digest and (other := expected.gradients.get(name)) and other.norm > 1e-2 * total
    ]
    factor = pairs[0][0].norm / pairs[0][1].norm if pairs else 1.0
    if not factor or abs(factor - 1) <= tolerance:
        return False
    scaled = (
        replace(other, norm=factor * other.norm, values=tuple(factor * value for value in other.values))
        for _, other in pairs
    )
    return all(distance(own, other) <= 2 * tolerance for (own, _), other in zip(pairs, scaled, strict=True))


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


# 3. Clocks.


def clocks(records: Records) -> Iterator[Diagnosis]:
    """Compare learning rates after equally many samples, unless they follow from metrics."""
    ranks, plain = by_shard(records[RANKS]), _one(records, PLAIN)
    schedules = ranks[0].schedules
    if plain is None or ranks[0].clock == "update" or not schedules or "ReduceLROnPlateau" in schedules:
        return
    expected = dict(_rates_by_samples([plain]))
    for number, (samples, rates) in enumerate(_rates_by_samples(ranks), 1):
        for rate, other in zip(rates, expected.get(samples, ()), strict=False):
            if relative(rate, other) > 1e-6:
                text = f"in step {number}, after {samples} samples, the learning rate is {rate:.4g}"
                name = "schedule-per-process" if any(schedules.values()) else "scheduler-not-prepared"
                yield Diagnosis(name, f"{text}, on one process {other:.4g}")
                return


def _rates_by_samples(ranks: Sequence[RunRecord]) -> Iterator[tuple[int, tuple[float, ...]]]:
    """Yield the rates of steps of the first optimizer with how many samples all ranks had seen before.

    They end with the first epoch: since passes end early, samples and steps part then.
    """
    first, before, seen = ranks[0], 0, 0
    for step in first.steps:
        batch = first.backwards[step.backwards - 1].batch if step.backwards else -1
        if step.backwards > seen:
            before, seen = seen, step.backwards
        if step.optimizer == 0 and batch >= 0 and first.batches[batch].epoch == 0:
            yield len(_samples_of(ranks, 0, before)), step.rates


def _samples_of(ranks: Sequence[RunRecord], start: int, stop: int) -> list[Any]:
    """Return the samples of some backward passes that are no padding, by index or by content."""
    batches = [
        record.batches[backward.batch]
        for record in ranks
        for backward in record.backwards[start:stop]
        if backward.batch >= 0
    ]
    return [sample for batch in batches for sample in (batch.indices or batch.rows)[: batch.real]]


# 4. Resume.


def resume(records: Records) -> Iterator[Diagnosis]:
    """Compare the resumed run with the undisturbed one, from the step after the checkpoint on."""
    again, ranks = by_shard(records.get(RESUMED, ())), by_shard(records[RANKS])
    first = ranks[0]
    if not again or not first.steps or any(record.stopped for record in records[RESUMED]):
        return
    start = first.steps[0].backwards
    later = (step for step in first.steps if step.backwards > start)
    for number, (step, expected) in enumerate(zip(again[0].steps, later, strict=False), 2):
        wanted, samples = _samples_of(ranks, start, expected.backwards), _samples_of(again, 0, step.backwards)
        if sorted(map(str, wanted)) != sorted(map(str, samples)):
            text = f"step {number} has different samples than in the uninterrupted run"
            yield Diagnosis("resume-other-samples", text)
            return
        if any(relative(*pair) > 1e-6 for pair in zip(step.rates, expected.rates, strict=False)):
            rates = f"{step.rates[0]:.4g}, uninterrupted {expected.rates[0]:.4g}"
            yield Diagnosis("resume-other-rate", f"the learning rate of step {number} is {rates}")
            return
        if number <= comparable_steps(first, first) and not random_samples(records):
            tolerance = rounding(tolerance_of(first), number - 1)
            name = first_difference(step, expected, first.modules, tolerance, floor=FLOOR)
            if name is not None:
                yield Diagnosis("resume-other-numbers", f"the gradient of {name} differs in step {number}")
                return


CHECKS: Mapping[str, Callable[[Records], Iterable[Diagnosis]]] = {
    "data": data,
    "gathered": lambda _: (),  # each process finds it by itself
    "numbers": numbers,
    "clocks": clocks,
    "resume": resume,
}
"""The comparisons by name."""
