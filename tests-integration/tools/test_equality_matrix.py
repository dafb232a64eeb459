"""Every strategy finds what one process finds, and the table would show it if one did not."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path

import pytest
import torch.distributed as dist

from equality.alone import FAULTS, Arithmetic, batches_of, is_clipped, train_alone
from equality.strategies import STRATEGIES
from equality_matrix import (
    HARDEST,
    QUICKEST,
    TABLE,
    cells_of,
    distance,
    faults_of,
    is_wrong,
    shown,
    table,
    work,
)
from harness import distributed
from harness.engines import deepspeed_process

ROOT = Path(__file__).resolve().parents[2]
STEPS = 3


def run(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "tools/equality_matrix.py", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-4000:]}"
    assert "FAIL" not in done.stdout
    return done.stdout


@distributed(world_size=2)
def test_three_strategies_equal_one_process_and_errors_are_noticed(tmp_path: Path) -> None:
    """The hardest cells on two processes; and, for one strategy, with every error made on purpose."""
    cells = [*cells_of(["fsdp2", "pp", "zero2"], 2, HARDEST), *faults_of(QUICKEST, 2)]
    task = tmp_path / "task.json"
    if dist.get_rank() == 0:
        task.write_text(json.dumps({"steps": 5, "cells": [asdict(cell) for cell in cells]}))
    dist.barrier()
    with deepspeed_process():
        work(task)
    values = json.loads((tmp_path / "results.json").read_text())
    assert len(values) == len(cells)
    assert not [
        shown(cell, value) for cell, value in zip(cells, values, strict=True) if is_wrong(cell, value)
    ]


@pytest.mark.thorough
def test_every_strategy_equals_one_process_and_errors_are_noticed() -> None:
    """As the tool prints it, from a job of its own."""
    said = run("--quick")
    rows = [line for line in said.splitlines() if line.startswith("| ") and re.search(r"\de[-+]0", line)]
    assert [row.split()[1] for row in rows] == [
        *(name for name, strategy in TABLE.items() if strategy.smallest == 2),
        *QUICKEST,
    ]


@cache
def without_error(clip: bool, how: Arithmetic) -> tuple:
    return train_alone(batches_of(3 * STEPS), accumulation=3, clip=clip, how=how)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(("strategy", "precision"), [("ddp", "no"), ("ddp", "bf16"), ("zero2", "bf16")])
def test_an_error_is_farther_away_than_any_bound_allows(strategy: str, precision: str, fault: str) -> None:
    (cell,) = cells_of([strategy], 2, [(precision, 3, True)])
    row = STRATEGIES[strategy]
    how, limit, exact = row.arithmetic(cell), row.limit(cell), precision == "no"
    rows, clip = batches_of(3 * STEPS), is_clipped(fault)
    right, begin = without_error(clip, how)
    wrong, _ = train_alone(rows, accumulation=3, clip=clip, how=how, fault=fault)
    assert distance(right, right, begin, exact=exact) == 0
    assert distance(wrong, right, begin, exact=exact) > 5 * limit


def test_a_cell_is_wrong_beyond_its_bound_or_if_an_error_does_not_show() -> None:
    (cell,) = cells_of(["ddp"], 2, [("no", 1, False)])
    assert not is_wrong(cell, 1e-6)
    assert is_wrong(cell, 2e-6)
    assert is_wrong(cell, "FAIL: the job died")
    assert is_wrong(replace(cell, fault="rate"), 1e-6)
    assert not is_wrong(replace(cell, fault="rate"), 2e-6)


def test_a_cell_that_cannot_exist_says_why() -> None:
    cells = cells_of(["ddp", "hsdp"], 2, [("no", 1, False)])
    told = table({cells[0]: 1.5e-7, cells[1]: STRATEGIES["hsdp"].impossible(cells[1])}, 2)
    assert "| ddp | 1.5e-07 |" in told
    assert "| hsdp | - |" in told
    assert "No hsdp with 2 processes: two axes of two processes each need 4." in told
