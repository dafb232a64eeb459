from __future__ import annotations

import sys
from pathlib import Path

import pytest

from accel_cli.main import main
from accel_inspect.check.command import find_problems
from accel_inspect.check.record import RankRecord
from accel_inspect.estimate.memory import Estimate
from accel_inspect.trial import RankTask, environ_on_cpu, run_script
from accel_state.settings import Layer, SourcedValue, merge_layers


def test_a_rank_that_needs_too_much_is_named():
    merged = merge_layers()
    memory = Estimate(strategy="DDP", parts={"parameters": 4 * 10**6, "optimizer": 20 * 10**6})
    records = [RankRecord(rank=0, memory=memory)]
    (problem,) = find_problems(records, merged, 8, 10**7)
    assert "rank 0 needs" in problem
    assert find_problems(records, merged, 8, 10**9) == []


def test_another_number_of_processes_in_the_config_is_reported():
    merged = merge_layers(
        {
            "launch.num_processes": SourcedValue(
                value=4, layer=Layer.FILE, origin="key num_processes of c.yaml"
            )
        }
    )
    problem = "key num_processes of c.yaml is 4, but --world is 8."
    assert find_problems([RankRecord(rank=0)], merged, 8, None) == [problem]


def test_a_rank_is_on_the_cpu_and_has_its_variables():
    task = RankTask(script="a.py", arguments=(), rank=9, world=16, local_world=8, folder="o")
    merged = merge_layers(
        {"precision.mixed_precision": SourcedValue(value="bf16", layer=Layer.FILE, origin="")}
    )
    environ = {**environ_on_cpu(merged, {"HOME": "/root"}), **task.environment}
    expected = {
        "HOME": "/root", "RANK": "9", "WORLD_SIZE": "16", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "8",
        "ACCELERATE_USE_CPU": "true", "ACCELERATE_MIXED_PRECISION": "bf16",
    }  # fmt: skip
    assert expected.items() <= environ.items()


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


def test_the_path_of_a_checked_script_is_absolute_as_in_python(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", [*sys.path])
    Path("a.py").write_text("from pathlib import Path\nassert Path(__file__).is_absolute()\n")
    task = RankTask(script="a.py", arguments=(), rank=0, world=1, local_world=1, folder="o")
    assert not run_script(task)
