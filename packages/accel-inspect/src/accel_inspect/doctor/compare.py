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
    Backward,
    Digest,
    LoaderPass,
    Records,
    RunRecord,
    Step,
    by_shard,
    first_of,
    same_pass,
)

TOLERANCES = {"float64": 1e-9, "float32": 5e-4, "float16": 2e-2, "bfloat16": 5e-2, "float8": 0.25}
"""Relative differences that are rounding, by dtype; in FP8 each rank scales by its own largest value, too."""

_MIXED = {"fp16": "float16", "bf16": "bfloat16", "fp8": "float8"}

_NOISE = 1e-5
"""Norm of a gradient, relative to that of all, below which it is rounding."""

_GROWTH = 5
"""By what the rounding of gradients grows with each step: the weights before it are rounded, too."""

FLOOR = 0.1
"""Part of the norm of all gradients; a ReLU that rounds to the other side changes small gradients most."""

_FEW_VALUES = 32
"""Values of a BatchNorm below which its statistics are those of no larger batch."""


def compare(records: Records) -> list[Diagnosis]:
    """Compare the runs. Returns the diagnoses of each check, or one that reports that all is equal."""
    first = records[RANKS][0]
    diagnoses = [*stops(records)]
    if any(record.stopped for record in records[RANKS]):
        return [*diagnoses, *data(records), *clocks(records)]
    for name, check in CHECKS.items():
        if name == "resume" and (
            first.differs_by or random_numbers(records) or any(map(_differs, diagnoses))
        ):
            records = {run: of_run for run, of_run in records.items() if run != RESCALED}
        found = [*check(records)]
        diagnoses += found
        if not any(map(_differs, found)) and (text := _equal(name, records)):
            diagnoses.append(Diagnosis(name, "", text))
    return diagnoses


def _differs(diagnosis: Diagnosis) -> bool:
    return diagnosis.differs or diagnosis.name == "numbers-not-compared"


def _equal(name: str, records: Records) -> str:
    """Describe what a check has found to be equal; empty if the runs have nothing of the kind."""
    first, single = records[RANKS][0], first_of(records, ONE)
    passes = sum(of_loader.is_prepared for of_loader in first.passes)
    samples = sum(batch.real for record in by_shard(records[RANKS]) for batch in record.batches)
    if name == "numbers":
        if single is None or single.stopped or not first.steps or first.differs_by or random_numbers(records):
            return ""
        what = "losses" if first.losses else "losses, gradients and weights"
        steps, tolerance = comparable_steps(first, single), tolerance_of(first, single)
        return f"{what} of {steps} optimizer steps, to {tolerance:.0e}"
    is_made, text = {
        "data": (passes, f"{samples} samples in {passes} passes, as on one process"),
        "gathered": (first.gathered, f"{len(first.gathered)} calls of gather and gather_for_metrics"),
        "clocks": (first.steps, f"{len(first.steps)} optimizer steps and their learning rates"),
        "waiting": (
            any(backward.reduces for backward in first.backwards),
            f"one all-reduce of {first.nbytes} bytes for each step",
        ),
        "resume": (RESUMED in records, "the steps after a checkpoint, on as many ranks and on one process"),
    }[name]
    return text if is_made else ""


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


# 3. Numbers.


def numbers(records: Records) -> Iterator[Diagnosis]:
    """Compare losses, gradients and weights step by step, up to the first difference."""
    ranks, single = records[RANKS], first_of(records, ONE)
    shards = by_shard(ranks)
    yield from _loss_dtypes(ranks[0])
    if len(shards) > 1 and ranks[0].norms:
        yield from _batch_norms(ranks)
    if single is not None and ranks[0].tied != single.tied and not ranks[0].losses:
        lost = [", ".join(names) for names in single.tied if names not in ranks[0].tied]
        text = f"one process has tied {'; '.join(lost) or 'none'}"
        yield Diagnosis("numbers", "weights-untied", text)
    if ranks[0].differs_by:
        yield Diagnosis("numbers", "numbers-not-compared", ranks[0].differs_by)
        return
    yield from _between_ranks(ranks)
    if single is None or single.stopped:
        return
    if len(shards) > 1 and (reason := random_numbers(records)):
        yield Diagnosis("numbers", "numbers-not-compared", reason, ranks[0].draws)
        return
    tolerance = tolerance_of(ranks[0], single)
    for number, step in enumerate(ranks[0].steps[: comparable_steps(ranks[0], single)]):
        start = ranks[0].steps[number - 1].backwards if number else 0
        comparable = _same_data(shards, single, start, step.backwards)
        if not comparable:
            text = (
                f"from step {number + 1} on, the ranks and the single process have different global batches"
            )
            yield Diagnosis("numbers", "numbers-not-compared", text)
            return
        difference = _compare_step(shards, single, number, start, tolerance)
        if difference is not None:
            yield difference
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
    """Return digests of samples by loader, pass, index and shape."""
    return {
        (batch.loader, batch.epoch, index, batch.shape): row
        for batch in record.batches
        for index, row in zip(batch.indices, batch.rows, strict=False)
    }


def _compare_step(
    ranks: Sequence[RunRecord], single: RunRecord, number: int, start: int, tolerance: float
) -> Diagnosis | None:
    step, expected = ranks[0].steps[number], single.steps[number]
    title = f"in step {number + 1}"
    if step.backwards != expected.backwards:
        text = f"{title} come {step.backwards} backward passes before, on one process {expected.backwards}"
        return Diagnosis("numbers", "windows-differ", text)
    losses = [_loss(ranks, index) for index in range(start, step.backwards)]
    wanted = [_loss([single], index) for index in range(start, step.backwards)]
    grown = rounding(tolerance, number)
    of_weights = min(grown, max(tolerance, 1e-2))
    # 1. The weights before the step, which were equal after the one before.
    if number:
        changed = _first_weight(step.before, expected.before, ranks[0].steps[number - 1], of_weights)
        if changed is not None:
            text = f"before step {number + 1}, {changed}; after the step before they were equal"
            return Diagnosis("numbers", "weights-differ", text)
    # 2. The first parameter in the order of execution whose gradient differs.
    name = first_difference(step, expected, ranks[0].modules, grown, floor=FLOOR if number else 0.0)
    if name is not None:
        gradient, other = step.gradients.get(name), expected.gradients.get(name)
        module = name.rpartition(".")[0] or name
        if gradient is None or other is None:
            missing = "the ranks have" if gradient is None else "one process has"
            text = f"{title}, {missing} no gradient for {name}"
            return Diagnosis("numbers", "unused-parameters", text)
        text = (
            f"{title}, the first gradient that differs is that of {name} (module {module}): norm"
            f" {gradient.norm:.4g}, on one process {other.norm:.4g}; loss {losses[0]:.6g}, on one process"
            f" {wanted[0]:.6g}"
        )
        return Diagnosis(
            "numbers",
            _explain(ranks, single, number, start, grown),
            text,
            ranks[0].backwards[start].where if start < len(ranks[0].backwards) else "",
        )
    # 3. Losses, where the gradients are not compared.
    for index, (loss, other) in enumerate(zip(losses, wanted, strict=True)):
        if ranks[0].losses and relative(loss, other) > max(tolerance, 5e-3):
            text = f"{title}, the loss is {loss:.6g}, on one process {other:.6g}"
            name = _normalisation(ranks, single, start + index) or "losses-differ"
            return Diagnosis("numbers", name, text, ranks[0].backwards[start + index].where)
    # 4. The weights after the step.
    changed = _first_weight(step.weights, expected.weights, step, of_weights)
    if changed is not None:
        text = f"after step {number + 1} with equal gradients, {changed}"
        return Diagnosis("numbers", "weights-differ", text)
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


def _explain(ranks: Sequence[RunRecord], single: RunRecord, number: int, start: int, tolerance: float) -> str:
    """Name a difference of gradients."""
    step, expected = ranks[0].steps[number], single.steps[number]
    for index in range(start, step.backwards):
        name = _normalisation(ranks, single, index)
        if name is not None:
            return name
    factor = _factor(step, expected, tolerance)
    if factor is not None and abs(factor - 1) > tolerance:
        return "gradients-scaled"
    if any(_have_other_shapes(ranks, index) for index in range(start, step.backwards)):
        return "mask-dropped"
    return "gradients-differ"


def _normalisation(ranks: Sequence[RunRecord], single: RunRecord, index: int) -> str | None:
    """Name the mean by which the losses of ranks give that of one process, if their plain mean does not."""
    passes = [record.backwards[index] for record in ranks]
    expected = single.backwards[index]
    if expected.items is not None or expected.batch < 0:
        return None
    mean = math.fsum(backward.loss for backward in passes) / len(passes)
    gap = abs(mean - expected.loss)
    if gap <= 1e-5 * abs(expected.loss):
        return None
    matches: list[str] = []
    of_single = single.batches[expected.batch].counts
    counts = [record.batches[backward.batch].counts for record, backward in zip(ranks, passes, strict=True)]
    for name in of_single:
        weights = [of_rank.get(name, 0.0) for of_rank in counts]
        if not sum(weights):
            continue
        weighted = math.fsum(
            weight * backward.loss for weight, backward in zip(weights, passes, strict=True)
        ) / sum(weights)
        if abs(weighted - expected.loss) < 0.02 * gap + 1e-6 * abs(expected.loss):
            matches.append(name)
    if not matches:
        return None
    elements = max((count for name, count in of_single.items() if "padding included" in name), default=0.0)
    masked = [name for name in matches if "padding included" not in name and of_single[name] < elements]
    return "mask-dropped" if _have_other_shapes(ranks, index) and not masked else "mean-of-means"


def _have_other_shapes(ranks: Sequence[RunRecord], index: int) -> bool:
    return len({record.batches[record.backwards[index].batch].shape for record in ranks}) > 1


def _factor(step: Step, expected: Step, tolerance: float) -> float | None:
    """Return the factor between all gradients, if there is one."""
    total = _total(expected.gradients)
    pairs = [
        (digest, other)
        for name, digest in step.gradients.items()
        if digest is not None
        and (other := expected.gradients.get(name)) is not None
        and other.norm > 1e-2 * total
    ]
    if not pairs:
        return None
    factor = pairs[0][0].norm / pairs[0][1].norm
    if factor == 0:
        return None
    for digest, other in pairs:
        values = tuple(value * factor for value in other.values)
        if distance(digest, replace(other, norm=other.norm * factor, values=values)) > 2 * tolerance:
            return None
    return factor


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
        if gradient is None and other is None:
            continue
        if gradient is None or other is None:
            if (gradient or other).norm > _NOISE * total:  # pyright: ignore[reportOptionalMemberAccess] - one of them is there
                return name
            continue
        norm = max(gradient.norm, other.norm)
        if norm > max(_NOISE, tolerance / 10) * total:
            share = norm / max(norm, floor * total)
            if share * distance(gradient, other) > tolerance:
                return name
    return None


def _between_ranks(ranks: Sequence[RunRecord]) -> Iterator[Diagnosis]:
    """Find gradients that ranks have not synchronised."""
    tolerance = tolerance_of(ranks[0])
    for number, step in enumerate(ranks[0].steps):
        for record in ranks[1:]:
            if number >= len(record.steps):
                return
            name = first_difference(record.steps[number], step, ranks[0].modules, tolerance)
            if name is not None:
                text = f"in step {number + 1}, rank {record.rank} has another gradient of {name} than rank 0"
                yield Diagnosis("numbers", "gradients-not-synchronised", text)
                return


def _batch_norms(ranks: Sequence[RunRecord]) -> Iterator[Diagnosis]:
    values = {name: min(record.norms.get(name, math.inf) for record in ranks) for name in ranks[0].norms}
    name = min(values, key=lambda key: values[key])
    text = f"{name} normalises with only the {values[name]} values of its rank"
    few = values[name] < _FEW_VALUES
    yield Diagnosis("numbers", "batchnorm-per-rank" if few else "batchnorm-of-each-rank", text)


def _loss_dtypes(record: RunRecord) -> Iterator[Diagnosis]:
    """Find losses of few bits in runs with mixed precision, whose models return float32."""
    low = next((backward for backward in record.backwards if backward.dtype in {"float16", "bfloat16"}), None)
    weights = {digest.dtype for step in record.steps for digest in step.weights.values()}
    if low is not None and record.precision in _MIXED and weights <= {"float32", "float64"}:
        text = f"the loss has the dtype {low.dtype}"
        yield Diagnosis("numbers", "loss-in-low-precision", text, low.where)


def _same_data(ranks: Sequence[RunRecord], single: RunRecord, start: int, stop: int) -> bool:
    for index in range(start, stop):
        if any(index >= len(record.backwards) for record in (*ranks, single)):
            return False
        if any(record.backwards[index].batch < 0 for record in (*ranks, single)):
            return True
        batches = [record.batches[record.backwards[index].batch] for record in ranks]
        expected = single.batches[single.backwards[index].batch]
        are_known = expected.indices and all(batch.indices for batch in batches)
        samples_of = attrgetter("indices" if are_known else "rows")
        union = [sample for batch in batches for sample in samples_of(batch)]
        if sorted(union) != sorted(samples_of(expected)):
            return False
    return True


def _loss(ranks: Sequence[RunRecord], index: int) -> float:
    """Return the loss of one backward pass over all ranks."""
    passes: list[Backward] = [record.backwards[index] for record in ranks]
    if passes[0].items is not None:
        items = math.fsum(backward.items or 0.0 for backward in passes)
        return math.fsum(backward.loss for backward in passes) / (items or 1.0)
    return math.fsum(backward.loss for backward in passes) / len(passes)


def tolerance_of(*records: RunRecord) -> float:
    """Return the relative difference that is rounding in the least precise dtype of these records."""
    dtypes = {
        digest.dtype
        for record in records
        for step in record.steps[:1]
        for digest in step.gradients.values()
        if digest is not None
    }
    dtypes |= {_MIXED[record.precision] for record in records if record.precision in _MIXED}
    return max(
        (TOLERANCES.get(dtype, TOLERANCES["float32"]) for dtype in dtypes), default=TOLERANCES["float32"]
    )


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
    """Return the relative difference of two numbers.

    Example:
        >>> relative(1.0, 1.0), relative(1.0, 2.0)
        (0.0, 0.5)
    """
    largest = max(abs(first), abs(second))
    return abs(first - second) / largest if largest else 0.0


def _total(gradients: Mapping[str, Digest | None]) -> float:
    return math.hypot(*(digest.norm for digest in gradients.values() if digest is not None))


# 4. Clocks.


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


# 5. Waiting.

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


# 6. Resume.


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


CHECKS: Mapping[str, Callable[[Records], Iterator[Diagnosis]]] = {
    "data": data,
    "gathered": gathered,
    "numbers": numbers,
    "clocks": clocks,
    "waiting": waiting,
    "resume": resume,
}
"""The comparisons by name."""
