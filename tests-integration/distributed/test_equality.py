"""Every strategy ends with the weights of one process of plain PyTorch, and errors made on purpose show.

A cell trains a small transformer: strategy x {fp32, bf16} x {1, 3} micro-batches x {clipped or not}.
Its value is the largest difference of a weight (fp32), or the distance of all weights relative to how far
they have moved (bf16). Rank 0 adds a row to `build/equality.md`; the page `reference/equality.md` has those
of 20 `STEPS`.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import cache
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

from accel import Accelerator
from accel.utils import DataLoaderConfiguration
from accel_plugins import sequence_parallel_loss
from accel_state.accelerator_state import AcceleratorState, GradientState
from distributed.equality.alone import CLIP, FAULTS, LENGTH, ROWS, batches_of, factor, is_clipped, train_alone
from distributed.equality.megatron import MEGATRON
from distributed.equality.strategies import STRATEGIES, Cell
from harness import cases, distributed
from harness.engines import deepspeed_process

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

STEPS = 5
TABLE = {**STRATEGIES, **MEGATRON}
ON_TWO = [name for name, row in TABLE.items() if row.smallest == 2]
HARDEST = [("no", 3, True), ("bf16", 3, True)]
KINDS = [*product(["no", "bf16"], [1, 3], [False, True])]
ROWS_OF_PAGE = Path(__file__).resolve().parents[2] / "build" / "equality.md"


@pytest.mark.parametrize("strategy", ["fsdp2", "pp", "zero2"])
@distributed(world_size=2)
def test_the_hardest_cells_equal_one_process(strategy):
    assert_equal(strategy, HARDEST)


@pytest.mark.thorough
@pytest.mark.parametrize("strategy", ON_TWO)
@distributed(world_size=2)
def test_two_processes_equal_one(strategy):
    assert_equal(strategy, KINDS)


@pytest.mark.thorough
@pytest.mark.parametrize("strategy", TABLE)
@distributed(world_size=4)
def test_four_processes_equal_one(strategy):
    assert_equal(strategy, KINDS)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("strategy", cases((name for name in ON_TWO if name in STRATEGIES), always={"zero2"}))
@distributed(world_size=2)
def test_an_error_made_on_purpose_shows(strategy, fault):
    for precision in ("no", "bf16"):
        if precision == "bf16" or not TABLE[strategy].recipe:
            value, limit = run(strategy, precision, 3, is_clipped(fault), fault)
            assert value > limit


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(("strategy", "precision"), [("ddp", "no"), ("ddp", "bf16"), ("zero2", "bf16")])
def test_an_error_is_farther_away_than_any_bound_allows(strategy, precision, fault):
    cell = Cell(strategy=strategy, precision=precision, accumulation=3, clip=True, world_size=2)
    row = TABLE[strategy]
    how, clip, exact = row.arithmetic(cell), is_clipped(fault), precision == "no"
    right, begin = alone(9, 3, clip, how, row.fresh)
    wrong, _ = train_alone(batches_of(9), accumulation=3, clip=clip, how=how, fault=fault)
    assert distance(right, right, begin, exact=exact) == 0
    assert distance(wrong, right, begin, exact=exact) > 5 * row.limit(cell)


def assert_equal(strategy: str, kinds: list[tuple[str, int, bool]]) -> None:
    """Train in several ways; rank 0 compares, and writes the row."""
    possible = [kind for kind in kinds if kind[0] == "bf16" or not TABLE[strategy].recipe]
    found = {kind: run(strategy, *kind) for kind in possible}
    if dist.get_rank() == 0:
        cells = [f"{found[kind][0]:.1e}" if kind in found else "-" for kind in kinds]
        ROWS_OF_PAGE.parent.mkdir(exist_ok=True)
        with ROWS_OF_PAGE.open("a") as file:
            file.write(f"{dist.get_world_size()} processes: | {strategy} | {' | '.join(cells)} |\n")
    assert not {kind: pair for kind, pair in found.items() if pair[0] > pair[1]}


def run(
    strategy: str, precision: str, accumulation: int, clip: bool, fault: str | None = None
) -> tuple[float, float]:
    """Train as a cell says; return the distance to what one process finds, and its limit."""
    row = TABLE[strategy]
    cell = Cell(
        strategy=strategy,
        precision=precision,
        accumulation=accumulation,
        clip=clip,
        world_size=dist.get_world_size(),
        fault=fault,
    )
    options: dict[str, Any] = {"mixed_precision": precision, **row.arguments(cell)}
    with ExitStack() as stack:
        stack.enter_context(row.context())
        if strategy.startswith("zero"):
            stack.enter_context(deepspeed_process())
        AcceleratorState._reset_state()
        GradientState._reset_state()
        accelerator = Accelerator(
            cpu=True,
            gradient_accumulation_steps=accumulation,
            dataloader_config=DataLoaderConfiguration(split_batches=True),
            **options,
        )
        state = (row.train or trained)(accelerator, cell, batches_of(STEPS * accumulation))
        accelerator.wait_for_everyone()
        accelerator.free_memory()
    if dist.get_rank():
        return 0.0 if fault is None else float("inf"), row.limit(cell)
    right, begin = alone(STEPS * accumulation, accumulation, clip, row.arithmetic(cell), row.fresh)
    return distance(state, right, begin, exact=precision == "no"), row.limit(cell)


@cache
def alone(batches: int, accumulation: int, clip: bool, how: Any, fresh: Any) -> Any:
    """What one process finds, and where it began."""
    return train_alone(batches_of(batches), accumulation=accumulation, clip=clip, how=how, begin_with=fresh)


def trained(accelerator: Any, cell: Cell, rows: Tensor) -> Mapping[str, Tensor]:
    """Train through `Accelerator`; the weights, whole."""
    model, optimizer = TABLE[cell.strategy].fresh(cell.fault)
    samples: Any = [{"input_ids": row[:-1], "shift_labels": row[1:]} for row in rows]
    loader = torch.utils.data.DataLoader(samples, batch_size=ROWS)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        inputs, labels = batch["input_ids"], batch["shift_labels"]
        positions = batch.get("position_ids", torch.arange(LENGTH).repeat(len(inputs), 1))
        parts = [inputs, labels, positions]
        with accelerator.accumulate(model), accelerator.maybe_context_parallel(parts, [1, 1, 1], {*parts}):
            times = factor(cell.fault, cell.accumulation)
            if TABLE[cell.strategy].computes_loss:
                loss = model(inputs, shift_labels=labels, factor=times)
            else:
                logits = model(inputs, positions)
                loss = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
                loss = sequence_parallel_loss(loss, labels.numel()) * times
            accelerator.backward(loss)
            if cell.clip and accelerator.sync_gradients and cell.fault != "unclipped":
                accelerator.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
    # The weights as they are updated, where the model has copies of them in 16 bits.
    exact = {"exact": True} if cell.strategy.startswith("zero") else {}
    return accelerator._parts.strategy.states.full_state_dict(model, **exact)


def distance(
    state: Mapping[str, Tensor], right: Mapping[str, Tensor], begin: Mapping[str, Tensor], *, exact: bool
) -> float:
    """The largest difference if `exact`; else the distance, as a share of the way from `begin` to `right`."""
    pairs = [(state[name].float(), value, begin[name]) for name, value in right.items()]
    if exact:
        return max((a - b).abs().max().item() for a, b, _ in pairs)
    off = torch.cat([(a - b).flatten() for a, b, _ in pairs]).norm()
    way = torch.cat([(b - c).flatten() for _, b, c in pairs]).norm()
    return (off / way).item()
