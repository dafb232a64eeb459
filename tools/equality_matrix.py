"""Train one small transformer under every strategy, and compare its parameters with those of one process.

    uv run tools/equality_matrix.py                          # everything; some minutes
    uv run tools/equality_matrix.py --quick                  # what the tests run
    uv run tools/equality_matrix.py --strategy fsdp2 --world-size 2

Every cell trains 20 steps on the same data: strategy x {fp32, bf16} x {1, 3} micro-batches x {clipped or not}
x {2, 4} processes`. What one process finds is computed by a loop in plain PyTorch, with autocast for bf16. A
cell shows the largest difference of a parameter (fp32), or the distance to what one process finds as a share
of the way that the parameters have gone (bf16); a cell that cannot exist says why.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "packages/accel-suite/examples/strategies/language_model.py"
BOUNDS = {"no": 1e-6, "bf16": 0.05}
"""The largest difference of a parameter in fp32; the largest share of the way gone in bf16."""
ENGINE_BF16 = 0.4
"""The same under DeepSpeed, which computes with weights and gradients of 16 bits throughout."""
STEPS, ROWS, CLIP = 20, 8, 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One entry of the table."""

    strategy: str
    precision: str
    accumulation: int
    clip: bool
    world_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A strategy: what `Accelerator` gets, and for which numbers of processes there is none."""

    arguments: Callable[[Cell], dict[str, Any]]
    impossible: Callable[[Cell], str | None] = lambda _: None


def _fsdp(version: int, **options: Any) -> dict[str, Any]:
    from accel.utils import FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=version,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"],
        **options,
    )
    return {"fsdp_plugin": plugin}


def _axes(**sizes: Any) -> dict[str, Any]:
    from accel.utils import ParallelismConfig

    return {"parallelism_config": ParallelismConfig(**sizes)}


def _deepspeed(cell: Cell, stage: int) -> dict[str, Any]:
    from accel.utils import DeepSpeedPlugin

    plugin = DeepSpeedPlugin(
        zero_stage=stage,
        gradient_accumulation_steps=cell.accumulation,
        gradient_clipping=CLIP if cell.clip else None,
    )
    return {"deepspeed_plugin": plugin}


def _even(cell: Cell) -> str | None:
    return None if cell.world_size >= 4 else "two axes of two ranks need four"


ROWS_OF_TABLE: dict[str, Row] = {
    "ddp": Row(arguments=lambda _: {}),
    "fsdp1": Row(arguments=lambda _: _fsdp(1)),
    "fsdp2": Row(arguments=lambda _: _fsdp(2)),
    "hsdp": Row(
        arguments=lambda cell: _fsdp(2) | _axes(dp_replicate_size=2, dp_shard_size=cell.world_size // 2),
        impossible=_even,
    ),
    "tp": Row(arguments=lambda cell: _axes(tp_size=cell.world_size)),
    "fsdp2+tp": Row(
        arguments=lambda cell: _fsdp(2) | _axes(dp_shard_size=cell.world_size // 2, tp_size=2),
        impossible=_even,
    ),
    "zero1": Row(arguments=lambda cell: _deepspeed(cell, 1)),
    "zero2": Row(arguments=lambda cell: _deepspeed(cell, 2)),
    "zero3": Row(arguments=lambda cell: _deepspeed(cell, 3)),
}


def main() -> int:
    """Run the cells that were asked for, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two processes, the hardest cells, five steps")
    parser.add_argument("--strategy", action="append", choices=ROWS_OF_TABLE, help="only these")
    parser.add_argument("--world-size", action="append", type=int, help="only these numbers of processes")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        return work(arguments.worker)
    worlds = arguments.world_size or ([2] if arguments.quick else [2, 4])
    strategies = arguments.strategy or [*ROWS_OF_TABLE]
    kinds = [*product(["no", "bf16"], [1, 3], [False, True])]
    if arguments.quick:
        kinds = [("no", 3, True), ("bf16", 1, False)]
    found: dict[Cell, Any] = {}
    for world in worlds:
        cells = [
            Cell(strategy=name, precision=precision, accumulation=count, clip=clip, world_size=world)
            for name in strategies
            for precision, count, clip in kinds
        ]
        found |= run_world(cells, world, 5 if arguments.quick else STEPS)
    print(table(found))
    return int(any(isinstance(value, str) and value.startswith("FAIL") for value in found.values()))


def run_world(cells: list[Cell], world: int, steps: int) -> dict[Cell, Any]:
    """Run the cells of one number of processes in one job."""
    reasons = {cell: ROWS_OF_TABLE[cell.strategy].impossible(cell) for cell in cells}
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


def table(found: dict[Cell, Any]) -> str:
    """The table as Markdown."""
    kinds = sorted({(c.precision, c.accumulation, c.clip, c.world_size) for c in found}, key=str)
    heads = [
        f"{'fp32' if precision == 'no' else precision}, {count} micro-batch{'es' if count > 1 else ''}"
        f"{', clipped' if clip else ''}, {world} processes"
        for precision, count, clip, world in kinds
    ]
    lines = ["| | " + " | ".join(heads) + " |", "| --- " * (len(heads) + 1) + "|"]
    for name in dict.fromkeys(cell.strategy for cell in found):
        row = [
            _shown(found.get(Cell(strategy=name, precision=p, accumulation=n, clip=c, world_size=w)))
            for p, n, c, w in kinds
        ]
        lines.append(f"| {name} | " + " | ".join(row) + " |")
    return "\n".join(lines)


def _shown(value: Any) -> str:
    return f"{value:.1e}" if isinstance(value, float) else str(value)


def work(task: Path) -> int:
    """Run cells on this rank; rank 0 writes what it has found after each."""
    import torch.distributed as dist

    from accel import Accelerator, PartialState

    asked = json.loads(task.read_text())
    example = _example()
    values: list[Any] = []
    known: dict[Any, Any] = {}
    is_main = PartialState(cpu=True).is_main_process
    for cell in (Cell(**one) for one in asked["cells"]):
        try:
            value = _run(cell, asked["steps"], example, known, Accelerator)
        except Exception as error:  # noqa: BLE001 - the table shows what went wrong
            value = f"FAIL: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        values.append(value)
        if is_main:
            print(f"{cell}: {_shown(value)}", file=sys.stderr, flush=True)
            (task.parent / "results.json").write_text(json.dumps(values))
    dist.barrier()
    return 0


def _run(cell: Cell, steps: int, example: Any, known: dict[Any, Any], accelerator_type: Any) -> Any:
    import torch

    from accel.state import AcceleratorState, GradientState
    from accel.utils import DataLoaderConfiguration

    AcceleratorState._reset_state()  # pyright: ignore[reportPrivateUsage] - documented for tests
    GradientState._reset_state()  # pyright: ignore[reportPrivateUsage] - documented for tests
    accelerator = accelerator_type(
        cpu=True,
        mixed_precision=cell.precision,
        gradient_accumulation_steps=cell.accumulation,
        dataloader_config=DataLoaderConfiguration(split_batches=True),
        **ROWS_OF_TABLE[cell.strategy].arguments(cell),
    )
    model, optimizer = _fresh(example)
    data = _data(steps * cell.accumulation)
    loader = torch.utils.data.DataLoader(data, batch_size=ROWS)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(_loss(model, batch))
            if cell.clip and accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
    # The weights as they are updated, where the model has copies of them in 16 bits.
    exact = {"exact": True} if cell.strategy.startswith("zero") else {}
    state = accelerator._parts.strategy.persister.full_state_dict(model, **exact)
    accelerator.wait_for_everyone()
    accelerator.free_memory()
    if not accelerator.is_main_process:
        return None
    key = (cell.precision, cell.accumulation, cell.clip)
    if key not in known:
        known[key] = _alone(cell, example, data)
    return _verdict(cell, state, *known[key])


def _verdict(cell: Cell, state: Any, right: Any, begin: Any) -> Any:
    import torch

    pairs = [(state[name].float(), value, begin[name]) for name, value in right.items()]
    if cell.precision == "no":
        found = max((a - b).abs().max().item() for a, b, _ in pairs)
    else:
        off = torch.cat([(a - b).flatten() for a, b, _ in pairs]).norm()
        way = torch.cat([(b - c).flatten() for _, b, c in pairs]).norm()
        found = (off / way).item()
    of_engine = cell.precision == "bf16" and cell.strategy.startswith("zero")
    bound = ENGINE_BF16 if of_engine else BOUNDS[cell.precision]
    return found if found <= bound else f"FAIL: {found:.1e}"


def _alone(cell: Cell, example: Any, data: Any) -> tuple[Any, Any]:
    """What one process finds, in plain PyTorch: the parameters at the end and at the beginning."""
    import torch

    model, optimizer = _fresh(example)
    begin = {name: value.clone() for name, value in model.state_dict().items()}
    for step, batch in enumerate(data.split(ROWS), start=1):
        with torch.autocast("cpu", torch.bfloat16, enabled=cell.precision == "bf16"):
            logits = model(batch[:, :-1])
        (_cross_entropy(logits.float(), batch) / cell.accumulation).backward()
        if step % cell.accumulation == 0:
            if cell.clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
    return model.state_dict(), begin


def _fresh(example: Any) -> tuple[Any, Any]:
    import torch

    torch.manual_seed(0)
    model = example.LanguageModel()
    # A larger eps than usual: what divides rounding errors by their own size shows nothing but them.
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)


def _data(batches: int) -> Any:
    import torch

    return torch.randint(0, 256, (batches * ROWS, 17), generator=torch.Generator().manual_seed(0))


def _loss(model: Any, batch: Any) -> Any:
    return _cross_entropy(model(batch[:, :-1]), batch)


def _cross_entropy(logits: Any, batch: Any) -> Any:
    import torch

    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def _example() -> Any:
    spec = importlib.util.spec_from_file_location("language_model", MODEL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    raise SystemExit(main())
