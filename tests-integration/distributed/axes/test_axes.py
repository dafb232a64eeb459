"""Training along every axis and pair of axes of parallelism ends as that of one process, or is refused."""

from __future__ import annotations

import runpy
import warnings
from itertools import combinations
from math import prod
from pathlib import Path
from typing import Any

import pytest

from accel_state.errors import AccelError
from harness import cases, distributed

AXES = ("dp_replicate", "dp_shard", "tp", "cp", "sp", "ep", "pp")
PROGRAM = Path(__file__).with_name("axes_program.py")
BOUND = 2e-5


def sizes_of(axes: tuple[str, ...], world: int) -> dict[str, int]:
    """Two ranks along each axis, or all along one.

    Experts are spread over processes that have samples of their own, so that this axis needs another one.
    """
    sizes = {axes[0]: world} if len(axes) == 1 else dict.fromkeys(axes, 2)
    if axes == ("ep",):
        sizes["dp_shard"] = world
    elif "ep" in axes:
        sizes["dp_shard"] = 4 if "dp_shard" in axes else 2
    return {f"{axis}_size": size for axis, size in sizes.items()}


def rows_of(world: int) -> dict[str, dict[str, int]]:
    """The sizes of every axis and pair of axes that take so many processes, by their text."""
    wanted = [*((axis,) for axis in AXES), *combinations(AXES, 2)]
    rows = [sizes_of(some, world) for some in wanted]
    fitting = [row for row in rows if prod(row.values()) // row.get("ep_size", 1) == world]
    return {
        ", ".join(f"{name.removesuffix('_size')}={size}" for name, size in row.items()): row
        for row in fitting
    }


ON_TWO, ON_FOUR = rows_of(2), rows_of(4)
REFUSED = "cp=2, sp=2"


def compare(sizes: dict[str, int]) -> None:
    """Run the program here, on every rank."""
    program: Any = runpy.run_path(str(PROGRAM))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module")  # of a model of transformers
        program["compare"](sizes, cpu=True, bound=BOUND)


@pytest.mark.parametrize("row", cases(ON_TWO, always={"tp=2"}))
@distributed(world_size=2)
def test_two_ranks_along_an_axis_train_as_one(row):
    compare(ON_TWO[row])


@pytest.mark.parametrize("row", cases((row for row in ON_FOUR if row != REFUSED), always={"tp=2, sp=2"}))
@distributed(world_size=4)
def test_four_ranks_along_two_axes_train_as_one(row):
    compare(ON_FOUR[row])


@distributed(world_size=4)
def test_context_and_sequence_parallelism_cannot_be_combined():
    with pytest.raises(AccelError, match="cannot be combined"):
        compare(ON_FOUR[REFUSED])
