"""`Accelerator` inside Ray Train's `TorchTrainer`: reported checkpoints survive, rows are read once."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from accel import Accelerator
from accel_state.errors import SettingsError
from accel_train.ray import report
from harness.ray_cluster import ENVIRON, IN_THIS_FOLDER, SKIP

pytestmark = pytest.mark.skipif(bool(SKIP), reason=SKIP)


@pytest.mark.thorough
def test_a_worker_that_dies_right_after_its_report_resumes_from_it(tmp_path):
    program = Path(__file__).parents[1] / "harness" / "ray_train.py"
    done = subprocess.run(
        [sys.executable, program, tmp_path],
        env={**os.environ, **ENVIRON, **IN_THIS_FOLDER},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    read: list[int] = []
    for rank in range(2):
        first, second = (tmp_path / f"rank-{rank}.txt").read_text().splitlines()
        assert first == f"rank {rank}/2 True from 2"  # of the four steps, those of the second epoch are left
        read += map(int, re.findall(r"\d+", second.partition("rows")[2]))
    assert sorted(read) == list(range(0, 64, 4))
    result = re.search(r"result (.*)", done.stdout)[1]
    assert "'step': 4" in result
    assert "model.safetensors" in result


@pytest.mark.thorough
def test_an_elastic_run_goes_on_with_fewer_workers_when_a_node_is_gone(tmp_path):
    program = Path(__file__).parents[1] / "harness" / "ray_train.py"
    done = subprocess.run(
        [sys.executable, program, tmp_path, "elastic"],
        env={**os.environ, **ENVIRON, **IN_THIS_FOLDER},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    # Two workers had two batches each. The other node is gone: one worker has all four of the second epoch.
    first, second = (tmp_path / "rank-0.txt").read_text().splitlines()
    assert first == "rank 0/1 True from 2"
    assert [*map(int, re.findall(r"\d+", second.partition("rows")[2]))] == list(range(0, 64, 4))
    assert "'step': 6" in re.search(r"result (.*)", done.stdout)[1]


@pytest.mark.thorough
def test_outside_of_ray_train_a_sentence_says_so(monkeypatch):
    monkeypatch.setenv("RAY_CLIENT_MODE", "0")  # Ray sets it when it is imported.
    with pytest.raises(SettingsError, match="within the train_loop_per_worker of a TorchTrainer"):
        report(Accelerator(cpu=True), {})
