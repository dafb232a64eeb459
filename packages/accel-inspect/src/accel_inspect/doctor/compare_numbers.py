"""Compare losses, gradients and weights of ranks with those of one process. Nothing imports torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any

from accel_inspect.doctor.causes import Diagnosis
from accel_inspect.doctor.record import (
    ONE,
    RANKS,
    Backward,
    Digest,
    Records,
    RunRecord,
    Step,
    by_shard,
    first_of,
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
