from __future__ import annotations

from dataclasses import replace

import pytest

from accel_cli.main import main
from accel_inspect.doctor.causes import CAUSES, NOTES, Diagnosis
from accel_inspect.doctor.compare import clocks, compare, data, first_difference, numbers, tolerance_of
from accel_inspect.doctor.record import (
    ONE,
    PLAIN,
    RANKS,
    Backward,
    Digest,
    LoaderPass,
    ReadBatch,
    RunRecord,
    Step,
)


def make_digest(*values, dtype="float32"):
    return Digest(
        norm=sum(value * value for value in values) ** 0.5, values=(sum(values), *values), dtype=dtype
    )


def make_batch(*samples, counts=None, width=2):
    return ReadBatch(
        loader=0,
        epoch=0,
        indices=samples,
        rows=tuple(map(str, samples)),
        real=len(samples),
        counts=counts or {},
        shape=((width,),),
    )


def make_backward(loss, batch=0, items=None):
    return Backward(batch=batch, loss=loss, items=items, where="train.py:9")


def make_step(*gradient, rate=0.1, backwards=1):
    return Step(
        optimizer=0,
        backwards=backwards,
        rates=(rate,),
        gradients={"layer.weight": make_digest(*gradient)},
        before={},
        weights={"layer.weight": make_digest(1.0, 2.0)},
    )


def make_pass(*plan, epoch=0, **options):
    options = {"shuffles": True, "is_prepared": True, **options}
    return LoaderPass(loader=0, epoch=epoch, where="train.py:7", plan=plan, **options)


def make_runs(ranks, one):
    """The records of two ranks and of one process, each given by its arguments."""
    return {
        RANKS: [
            RunRecord(run=RANKS, rank=rank, shards=2, shard=rank, strategy="ddp", **parts)
            for rank, parts in enumerate(ranks)
        ],
        ONE: [RunRecord(run=ONE, rank=0, shards=2, strategy="single", **one)],
    }


def names(diagnoses):
    return [diagnosis.name for diagnosis in diagnoses]


WHOLE = ((0, 1, 2, 3), (4, 5, 6, 7))


@pytest.mark.parametrize(
    ("plans", "name"),
    [
        ((((0, 1), (4, 5)), ((2, 3), (6, 7))), None),
        ((((0, 1),), ((2, 3),)), "sharded-twice"),
        ((((0, 1), (4, 5)), ((0, 1), (6, 7))), "other-samples-per-rank"),
        ((((0, 1, 2, 3), (4, 5, 6, 7)),) * 2, "other-samples-per-rank"),
        ((((0, 1), (4, 5)), ((6, 7), (2, 3))), "order-differs"),
        ((((0, 1), (4, 5)), ((2, 3),)), "uneven-batches"),
    ],
)
def test_samples_that_ranks_miss_or_share_have_a_name(plans, name):
    records = make_runs([{"passes": (make_pass(*plan),)} for plan in plans], {"passes": (make_pass(*WHOLE),)})
    assert names(data(records)) == ([] if name is None else [name])


def test_two_epochs_of_a_shuffled_loader_have_different_orders():
    both = (make_pass(*WHOLE), make_pass(*WHOLE, epoch=1))
    records = make_runs([{"passes": both}, {"passes": both}], {"passes": both})
    assert "epoch-not-set" in names(data(records))
    in_order = tuple(make_pass(*WHOLE, epoch=epoch, shuffles=False) for epoch in (0, 1))
    records = make_runs([{"passes": in_order}, {"passes": in_order}], {"passes": in_order})
    assert "epoch-not-set" not in names(data(records))


def runs_with_losses(losses, loss, counts, *, widths=(3, 3), gradient=(1.0, 2.0), expected=(1.0, 2.5)):
    name = "labels other than -100"
    full = "elements of labels, padding included"
    return make_runs(
        [
            {
                "batches": (
                    make_batch(rank, counts={name: counts[rank], full: 2 * widths[rank]}, width=widths[rank]),
                ),
                "backwards": (make_backward(losses[rank]),),
                "steps": (make_step(*gradient),),
            }
            for rank in (0, 1)
        ],
        {
            "batches": (make_batch(0, 1, counts={name: sum(counts), full: 4 * max(widths)}),),
            "backwards": (make_backward(loss),),
            "steps": (make_step(*expected),),
        },
    )


def test_a_mean_of_the_means_of_ranks_is_distinguished_from_other_differences():
    tokens = (2 * 1 + 4 * 3) / 6
    (found,) = numbers(runs_with_losses((1.0, 3.0), tokens, (2, 4)))
    assert found.name == "mean-of-means"
    assert "layer.weight" in found.text
    assert found.where == "train.py:9"
    (found,) = numbers(runs_with_losses((1.0, 3.0), 2.0, (2, 4)))
    assert found.name == "gradients-differ"


def test_a_loss_that_counts_padding_is_distinguished_from_a_mean_of_means():
    weighted = (6 * 1 + 10 * 3) / 16
    (found,) = numbers(runs_with_losses((1.0, 3.0), weighted, (2, 4), widths=(3, 5)))
    assert found.name == "mask-dropped"


def test_gradients_that_differ_by_a_factor_are_distinguished_from_others():
    (found,) = numbers(runs_with_losses((1.0, 3.0), 2.0, (3, 3), gradient=(2.0, 4.0), expected=(1.0, 2.0)))
    assert found.name == "gradients-scaled"


def test_rounding_is_no_difference():
    assert not [*numbers(runs_with_losses((1.0, 3.0), 2.0, (3, 3), expected=(1.0, 2.0 + 1e-6)))]
    records = runs_with_losses((1.0, 3.0), 2.0, (3, 3), expected=(1.0, 2.02))
    assert names(numbers(records)) == ["gradients-differ"]
    for run in records.values():
        for record in run:
            object.__setattr__(record, "precision", "bf16")
    assert tolerance_of(records[RANKS][0]) == 5e-2
    assert not [*numbers(records)]


def test_the_first_parameter_is_that_of_the_module_that_is_executed_first():
    own = {"head.weight": make_digest(1.0), "embedding.weight": make_digest(1.0)}
    other = {"head.weight": make_digest(2.0), "embedding.weight": make_digest(3.0)}
    step, expected = make_step(1.0), make_step(1.0)
    object.__setattr__(step, "gradients", own)
    object.__setattr__(expected, "gradients", other)
    assert first_difference(step, expected, ("embedding", "head"), 1e-3) == "embedding.weight"
    assert first_difference(step, expected, ("head", "embedding"), 1e-3) == "head.weight"


def test_ranks_with_different_gradients_have_not_synchronised_them():
    records = runs_with_losses((1.0, 3.0), 2.0, (3, 3), expected=(1.0, 2.0))
    object.__setattr__(records[RANKS][1], "steps", (make_step(5.0, 5.0),))
    assert names(numbers(records)) == ["gradients-not-synchronised"]


@pytest.mark.parametrize(
    ("is_prepared", "rate", "name"),
    [(True, 0.05, None), (True, 0.02, "schedule-per-process"), (False, 0.09, "scheduler-not-prepared")],
)
def test_learning_rates_are_compared_after_equally_many_samples(is_prepared, rate, name):
    """Two ranks with one sample each: their second step is the third one of a process with one."""
    of_rank = {
        "batches": (make_batch(0), make_batch(1)),
        "backwards": (make_backward(1.0), make_backward(1.0, batch=1)),
        "steps": (make_step(1.0), make_step(1.0, rate=rate, backwards=2)),
        "schedules": {"StepLR": is_prepared},
    }
    alone = {
        "batches": tuple(map(make_batch, range(3))),
        "backwards": tuple(make_backward(1.0, batch=batch) for batch in range(3)),
        "steps": tuple(
            make_step(1.0, rate=rate, backwards=number) for number, rate in enumerate((0.1, 0.07, 0.05), 1)
        ),
    }
    records = make_runs([of_rank, of_rank], of_rank)
    records[PLAIN] = [RunRecord(run=PLAIN, rank=0, **alone)]
    assert names(clocks(records)) == ([] if name is None else [name])


def test_a_failure_of_one_process_is_no_difference():
    records = make_runs([{}, {}], {"stopped": "RuntimeError at train.py:3: out of memory"})
    (found, *_) = compare(records)
    assert found.name == "one-process-stopped"
    assert not found.differs
    records = make_runs([{}, {"stopped": "ValueError at train.py:3: no"}], {})
    (found, *_) = compare(records)
    assert found.name == "rank-stopped"
    assert "rank 1: ValueError at train.py:3: no" in str(found)


def test_a_diagnosis_is_one_line_with_its_cause():
    assert str(Diagnosis(check="data", name="", text="8 samples")) == "equal: data: 8 samples"
    for name, advice in CAUSES.items():
        line = str(Diagnosis(check="data", name=name, text="here", where="train.py:3"))
        assert line.startswith("note: data" if name in NOTES else "differs: data")
        assert advice in line
        assert "\n" not in line


@pytest.mark.parametrize(
    ("words", "part"),
    [(["/nowhere.py"], "'/nowhere.py'"), (["--steps", "0", __file__], "--steps"), ([], "no script")],
)
def test_a_command_line_that_cannot_be_used_is_reported(words, part, capsys):
    assert main(["doctor", *words]) == 2
    assert part in capsys.readouterr().err


def test_random_numbers_in_the_loop_are_reported_instead_of_compared():
    parts = {"batches": (make_batch(0, 1),), "backwards": (make_backward(1.0),)}
    ranks = [
        {**parts, "batches": (make_batch(rank),), "steps": (make_step(2.0),), "draws": "train.py:8"}
        for rank in range(2)
    ]
    runs = make_runs(ranks, {**parts, "steps": (make_step(1.0),)})
    assert [(item.name, item.where) for item in numbers(runs)] == [("numbers-not-compared", "train.py:8")]
    quiet = make_runs([{**part, "draws": ""} for part in ranks], {**parts, "steps": (make_step(1.0),)})
    assert [item.differs for item in numbers(quiet)] == [True]


def test_samples_that_are_drawn_anew_are_reported_by_their_index():
    parts = {"backwards": (make_backward(1.0),)}
    ranks = [{**parts, "batches": (make_batch(rank),), "steps": (make_step(2.0),)} for rank in range(2)]
    drawn = replace(make_batch(0, 1), rows=("0", "other"))
    runs = make_runs(ranks, {**parts, "batches": (drawn,), "steps": (make_step(1.0),)})
    (found,) = numbers(runs)
    assert (found.name, "sample 1" in found.text) == ("numbers-not-compared", True)
    padded = replace(drawn, shape=((3,),))  # padded to another width, the same samples
    runs = make_runs(ranks, {**parts, "batches": (padded,), "steps": (make_step(1.0),)})
    assert [item.differs for item in numbers(runs)] == [True]
