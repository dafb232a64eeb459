"""Train one small transformer under every strategy, and compare its parameters with those of one process.

    uv run tools/equality_matrix.py                          # everything; about half an hour on two cores
    uv run tools/equality_matrix.py --quick                  # what the tests run
    uv run tools/equality_matrix.py --strategy fsdp2 --world-size 2
    uv run tools/equality_matrix.py --faults                 # would it show? errors that are made on purpose

Every cell trains 20 steps on the same data: strategy x {fp32, bf16} x {1, 3} micro-batches x {clipped or not}
x {2, 4} processes. The one-process result is computed by a loop in plain PyTorch (`equality/alone.py`), which
in bf16 rounds where the strategy does. A cell shows the largest difference of a parameter (fp32), or the
distance to the one-process result relative to how far the parameters have moved (bf16); a cell that
cannot exist says why. Strategies and their bounds are in `equality/strategies.py` and `equality/megatron.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import cross_entropy

from accel import Accelerator, PartialState
from accel.state import AcceleratorState, GradientState
from accel.utils import DataLoaderConfiguration
from accel_plugins import sequence_parallel_loss
from equality.alone import (
    CLIP,
    FAULTS,
    LENGTH,
    ROWS,
    batches_of,
    factor,
    is_clipped,
    train_alone,
)
from equality.megatron import MEGATRON
from equality.strategies import STRATEGIES, Cell

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

KINDS = [*product(["no", "bf16"], [1, 3], [False, True])]
HARDEST = [("no", 3, True), ("bf16", 3, True)]
QUICKEST = ["zero2"]
STEPS = 20
TABLE = {**STRATEGIES, **MEGATRON}
"""The rows by name."""


def main() -> int:
    """Run the cells that were asked for, and print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two processes, the hardest cells, five steps")
    parser.add_argument("--faults", action="store_true", help="make errors, which must be noticed")
    parser.add_argument("--strategy", action="append", choices=TABLE, help="only these")
    parser.add_argument("--world-size", action="append", type=int, help="only these numbers of processes")
    parser.add_argument("--steps", type=int, default=STEPS, help="of every cell")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        return work(arguments.worker)
    quick, faults = arguments.quick, arguments.faults
    worlds = arguments.world_size or ([2] if quick or faults else [2, 4])
    names = arguments.strategy or [*TABLE]
    found: dict[Cell, Any] = {}
    for world in worlds:
        right = [] if faults else cells_of(names, world, HARDEST if quick else KINDS)
        wrong = (
            faults_of([name for name in names if not quick or name in QUICKEST], world)
            if faults or quick
            else []
        )
        cells = [*right, *wrong]
        found |= run_world(cells, world, 5 if quick else arguments.steps)
        print(table(found, world), flush=True)
    return int(any(is_wrong(cell, value) for cell, value in found.items()))


def cells_of(names: Sequence[str], world: int, kinds: Sequence[tuple[str, int, bool]]) -> list[Cell]:
    """The cells of one number of processes."""
    return [
        Cell(strategy=name, precision=precision, accumulation=count, clip=clip, world_size=world)
        for name in names
        for precision, count, clip in kinds
    ]


def faults_of(names: Sequence[str], world: int) -> list[Cell]:
    """The cells in which errors are made."""
    return [
        Cell(
            strategy=name,
            precision=precision,
            accumulation=3,
            clip=is_clipped(fault),
            world_size=world,
            fault=fault,
        )
        for name in names
        for precision in ("no", "bf16")
        for fault in FAULTS
    ]


def is_wrong(cell: Cell, value: Any) -> bool:
    """Whether a cell is not as it must be: within its bound, or with an error beyond it."""
    if isinstance(value, str):
        return value.startswith("FAIL")
    return (value <= TABLE[cell.strategy].limit(cell)) == (cell.fault is not None)


def run_world(cells: Sequence[Cell], world: int, steps: int) -> dict[Cell, Any]:
    """Run the cells of one number of processes in one job."""
    reasons = {cell: TABLE[cell.strategy].impossible(cell) for cell in cells}
    to_run = [cell for cell in cells if reasons[cell] is None]
    with tempfile.TemporaryDirectory() as folder:
        task = Path(folder) / "task.json"
        task.write_text(json.dumps({"steps": steps, "cells": [asdict(cell) for cell in to_run]}))
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            f"--nproc-per-node={world}",
            "--standalone",
        ]
        subprocess.run(
            [*command, __file__, "--worker", str(task)],
            env={**os.environ, "ACCELERATE_USE_CPU": "1", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"},
            check=False,
        )
        results = Path(folder) / "results.json"
        values: list[Any] = json.loads(results.read_text()) if results.exists() else []
    missing = ["FAIL: the job died"] * (len(to_run) - len(values))
    ran = dict(zip(to_run, [*values, *missing], strict=True))
    return {cell: ran.get(cell, reasons[cell]) for cell in cells}


def table(found: Mapping[Cell, Any], world: int) -> str:
    """The cells of one number of processes as Markdown: those that must be right, those that must not."""
    cells = [cell for cell in found if cell.world_size == world]
    parts = [f"\n{world} processes:"]
    for some in ([c for c in cells if c.fault is None], [c for c in cells if c.fault is not None]):
        kinds = [*dict.fromkeys(replace(cell, strategy="") for cell in some)]
        if not some:
            continue
        lines = ["| | " + " | ".join(map(_head, kinds)) + " |", "| --- " * (len(kinds) + 1) + "|"]
        for name in dict.fromkeys(cell.strategy for cell in some):
            row = [replace(kind, strategy=name) for kind in kinds]
            lines.append(f"| {name} | " + " | ".join(shown(cell, found.get(cell)) for cell in row) + " |")
        parts.append("\n".join(lines))
    reasons = {cell.strategy: TABLE[cell.strategy].impossible(cell) for cell in cells}
    parts += [f"No {name} with {world} processes: {why}." for name, why in reasons.items() if why is not None]
    return "\n\n".join(parts) + "\n"


def _head(kind: Cell) -> str:
    parts = ["fp32" if kind.precision == "no" else kind.precision]
    if kind.fault is not None:
        return f"{parts[0]}, {FAULTS[kind.fault]}"
    parts.append(f"{kind.accumulation} micro-batch{'es' if kind.accumulation > 1 else ''}")
    return ", ".join(parts + ["clipped"] * kind.clip)


def shown(cell: Cell, value: Any) -> str:
    """The text of one cell."""
    if TABLE[cell.strategy].impossible(cell) is not None:
        return "-"
    text = f"{value:.1e}" if isinstance(value, float) else str(value)
    return f"FAIL: {text}" if is_wrong(cell, value) and not text.startswith("FAIL") else text


def work(task: Path) -> int:
    """Run cells on this rank; rank 0 writes what it has found after each."""
    asked = json.loads(task.read_text())
    values: list[Any] = []
    known: dict[Any, Any] = {}
    is_main = PartialState(cpu=True).is_main_process
    for cell in (Cell(**one) for one in asked["cells"]):
        try:
            value = _run(cell, asked["steps"], known)
        except Exception as error:  # noqa: BLE001 - the table shows what went wrong
            value = f"FAIL: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        values.append(value)
        if is_main:
            print(f"{cell}: {shown(cell, value)}", file=sys.stderr, flush=True)
            (task.parent / "results.json").write_text(json.dumps(values))
    torch.distributed.barrier()
    return 0


def _run(cell: Cell, steps: int, known: dict[Any, Any]) -> float | None:
    """Train as a cell says; on the main process, the distance to what one process finds."""
    AcceleratorState._reset_state()
    GradientState._reset_state()
    row = TABLE[cell.strategy]
    options: dict[str, Any] = {"mixed_precision": cell.precision, **row.arguments(cell)}
    rows = batches_of(steps * cell.accumulation)
    with row.context():
        accelerator = Accelerator(
            cpu=True,
            gradient_accumulation_steps=cell.accumulation,
            dataloader_config=DataLoaderConfiguration(split_batches=True),
            **options,
        )
        state = (row.train or trained)(accelerator, cell, rows)
    if not accelerator.is_main_process:
        return None
    how = row.arithmetic(cell)
    key = (cell.accumulation, cell.clip, how, row.fresh)
    if key not in known:
        known[key] = train_alone(
            rows, accumulation=cell.accumulation, clip=cell.clip, how=how, begin_with=row.fresh
        )
    return distance(state, *known[key], exact=cell.precision == "no")


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
    persister = accelerator._parts.strategy.states
    # The weights as they are updated, where the model has copies of them in 16 bits.
    exact = {"exact": True} if cell.strategy.startswith("zero") else {}
    state = persister.full_state_dict(model, **exact)
    accelerator.wait_for_everyone()
    accelerator.free_memory()
    return state


def distance(
    state: Mapping[str, Tensor], right: Mapping[str, Tensor], begin: Mapping[str, Tensor], *, exact: bool
) -> float:
    """How far weights are from what they should be.

    Args:
        state: Name to weight.
        right: What one process finds.
        begin: Where it began.
        exact: Whether the largest difference counts; else the distance as a share of the way gone.
    """
    pairs = [(state[name].float(), value, begin[name]) for name, value in right.items()]
    if exact:
        return max((a - b).abs().max().item() for a, b, _ in pairs)
    off = torch.cat([(a - b).flatten() for a, b, _ in pairs]).norm()
    way = torch.cat([(b - c).flatten() for _, b, c in pairs]).norm()
    return (off / way).item()


if __name__ == "__main__":
    raise SystemExit(main())
