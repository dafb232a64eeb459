from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel_cli.commands.check.command import find_problems, fp8_refusals, worker_environ_of_check
from accel_cli.commands.check.record import (
    LoaderRecord,
    RankRecord,
    RankTask,
    RecordedCollective,
    SelectedStrategy,
    data_problems,
    differences,
    ranks_to_check,
)
from accel_cli.commands.estimate.memory import ModelSizes
from accel_cli.launch.hosts import HostDevices
from accel_cli.main import main
from accel_state.settings import Layer, SourcedValue, merge_layers

GATHER = RecordedCollective(kind="gather", where="train.py:3")
SAVE = RecordedCollective(kind="save_state", where="train.py:9")
SIZES = ModelSizes(parameters=10**6, trainable=10**6, blocks=(10**5,) * 10, largest=10**5)


@pytest.mark.parametrize(
    ("first", "second", "found"),
    [
        ((GATHER, SAVE), (GATHER, SAVE), None),
        ((GATHER, SAVE), (SAVE,), (GATHER, SAVE)),
        ((GATHER, SAVE), (GATHER,), (SAVE, None)),
        ((), (SAVE,), (None, SAVE)),
    ],
)
def test_the_first_point_at_which_ranks_part_is_found(first, second, found):
    records = [
        RankRecord(rank=0, events=first),
        RankRecord(rank=3, events=second),
        RankRecord(rank=5, events=second),
    ]
    differing = differences(records)
    assert [(one.first, one.second, one.ranks) for one in differing] == ([(*found, (3, 5))] if found else [])


def test_what_a_rank_would_do_after_an_error_is_not_guessed():
    stopped = RankRecord(rank=1, events=(GATHER,), stopped="ValueError")
    assert differences([RankRecord(rank=0, events=(GATHER, SAVE)), stopped]) == []


@given(
    st.lists(st.sampled_from((GATHER, SAVE)), max_size=5),
    st.lists(st.sampled_from((GATHER, SAVE)), max_size=5),
)
def test_ranks_part_exactly_if_they_do_different_things(first, second):
    found = differences([RankRecord(rank=0, events=tuple(first)), RankRecord(rank=1, events=tuple(second))])
    assert bool(found) == (first != second)


@given(st.integers(1, 10**4), st.integers(1, 16))
def test_the_ranks_to_try_exist_and_the_ends_are_among_them(world, local):
    ranks = ranks_to_check(world, local)
    assert ranks == tuple(sorted(set(ranks)))
    assert ranks[0] == 0
    assert ranks[-1] == world - 1


def test_a_rank_that_needs_too_much_is_named():
    merged = merge_layers()
    found = find_problems(
        [RankRecord(rank=0, strategy=SelectedStrategy(name="ddp"), sizes=SIZES)], merged, 8, 10**7
    )
    assert found.estimates[0].strategy == "DDP"
    assert found.estimates[0].device == 24 * 10**6
    assert "rank 0 needs" in found.problems[0]
    assert (
        find_problems(
            [RankRecord(rank=0, strategy=SelectedStrategy(name="ddp"), sizes=SIZES)], merged, 8, 10**9
        ).problems
        == ()
    )


def test_another_number_of_processes_in_the_config_is_reported():
    merged = merge_layers(
        {
            "launch.num_processes": SourcedValue(
                value=4, layer=Layer.FILE, origin="key num_processes of c.yaml"
            )
        }
    )
    assert find_problems([RankRecord(rank=0)], merged, 8, None).problems == (
        "key num_processes of c.yaml is 4, but --world is 8.",
    )


@pytest.mark.parametrize(
    ("backend", "use_cpu", "machine", "parts"),
    [
        (
            "TE",
            True,
            {},
            ["key mixed_precision of c.yaml", "TransformerEngine trains on", "not 'cpu'", "'AO'"],
        ),
        ("AO", True, {"fp8_backends": ()}, ["needs torchao", "pip install"]),
        (None, False, {"gpus": 1, "capability": lambda: (8, 0)}, ["8.9 or newer", "has 8.0", "'bf16'"]),
        ("TE", False, {"gpus": 1, "fp8_backends": ("AO",)}, ["needs TransformerEngine", "pip install"]),
        ("TE", False, {"fp8_backends": ()}, []),  # the job runs elsewhere
        ("TE", False, {"gpus": 1, "capability": lambda: (9, 0)}, []),
        ("AO", True, {}, []),
    ],
)
def test_fp8_that_the_devices_of_the_job_cannot_compute_is_a_problem(backend, use_cpu, machine, parts):
    values = {"precision.mixed_precision": "fp8", "fp8.backend": backend, "process.use_cpu": use_cpu}
    merged = merge_layers(
        {
            path: SourcedValue(
                value=value, layer=Layer.FILE, origin=f"key {path.rpartition('.')[2]} of c.yaml"
            )
            for path, value in values.items()
        }
    )
    found = fp8_refusals(merged, HostDevices(**{"gpus": 0, "cores": 8, **machine}))
    assert len(found) == bool(parts)
    assert all(part in problem for problem in found for part in parts), found


def test_a_player_is_on_the_cpu_and_knows_its_place():
    order = RankTask(script="a.py", arguments=(), rank=9, world=16, local_world=8, batches=2, output="o")
    merged = merge_layers(
        {"precision.mixed_precision": SourcedValue(value="bf16", layer=Layer.FILE, origin="")}
    )
    environ = {**worker_environ_of_check(merged, {"HOME": "/root"}), **order.environment}
    wanted = {
        "HOME": "/root", "RANK": "9", "WORLD_SIZE": "16", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "8",
        "ACCELERATE_USE_CPU": "true", "ACCELERATE_MIXED_PRECISION": "bf16",
    }  # fmt: skip
    assert wanted.items() <= environ.items()


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--world", "0", __file__], "--world"),
        (["--world", "2", "/nowhere.py"], "'/nowhere.py'"),
        (["--world", "2", "--ranks", "2", __file__], "'2'"),
        (["--world", "2", "--memory", "much", __file__], "--memory"),
    ],
)
def test_a_command_line_that_cannot_be_used_is_reported(words, part, capsys):
    assert main(["check", *words]) == 2
    assert part in capsys.readouterr().err


def test_samples_that_ranks_share_or_miss_are_problems_unless_they_share_a_shard():
    def problems(*pairs):
        loaders = [LoaderRecord(where="train.py:3", **facts) for facts in pairs]
        return data_problems([RankRecord(rank=rank, loaders=(one,)) for rank, one in enumerate(loaders)])

    same = {"batches": ("a", "b")}
    (text,) = problems({"shard": 0, **same}, {"shard": 1, **same})
    assert text == "rank 0 and rank 1 read the same samples from the loader prepared at train.py:3"
    assert problems({"shard": 0, **same}, {"shard": 0, **same}) == []
    assert problems({"shard": 0, **same}, {"shard": 1, "batches": ("c",)}) == []
    assert problems({"shard": 0}, {"shard": 1}) == []
    (text,) = problems({"shard": 0, "indices": "a"}, {"shard": 1, "indices": "b"})
    assert "miss samples" in text
    assert "already_sharded=True" in text
    assert problems({"shard": 0, "indices": "a"}, {"shard": 1, "indices": "a"}) == []
