"""Prepared training loop on one process, time per step relative to plain PyTorch.

    uv run python tools/benchmarks/train_loop.py [--reference-python PATH]

Both loops train the same tiny model on the CPU, batch 4, from a real DataLoader; they alternate within one
process, so that whatever else the machine does slows down both. Printed is the ratio of their times per step:
the median over pairs of epochs that ran one after the other. With the interpreter of an environment that has
the reference, the same is done there. Claim: at most 1.10.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from compared import options
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

if TYPE_CHECKING:
    from collections.abc import Callable

CLAIM = 1.10
STEPS = 300
BATCH = 4


def make_parts() -> tuple[Any, Any, Any, Any]:
    """A model, optimizer, loader and scheduler, always the same."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = TensorDataset(torch.randn(STEPS * BATCH, 32), torch.randint(10, (STEPS * BATCH,)))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1000)
    return model, optimizer, DataLoader(data, batch_size=BATCH, shuffle=True), scheduler


def bare_loop() -> Callable[[], object]:
    """Plain PyTorch."""
    model, optimizer, loader, scheduler = make_parts()

    def epoch() -> None:
        for inputs, labels in loader:
            loss = cross_entropy(model(inputs), labels)
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

    return epoch


def prepared_loop(library: str) -> Callable[[], object]:
    """The same through `Accelerator`, gradient accumulation context included."""
    accelerator = import_module(library).Accelerator(cpu=True)
    model, optimizer, loader, scheduler = accelerator.prepare(*make_parts())

    def epoch() -> None:
        for inputs, labels in loader:
            with accelerator.accumulate(model):
                loss = cross_entropy(model(inputs), labels)
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

    return epoch


def measure(library: str, rounds: int) -> dict[str, float]:
    """Run the two loops alternately.

    Returns:
        Microseconds per step of both, medians, and the median of the ratios of neighbours.
    """
    torch.set_num_threads(1)
    loops = {"bare": bare_loop(), "prepared": prepared_loop(library)}
    for epoch in loops.values():
        epoch()
    times: dict[str, list[float]] = {name: [] for name in loops}
    for turn in range(rounds):
        # Who goes first alternates too.
        for name in sorted(loops, reverse=turn % 2 == 1):
            start = time.perf_counter()
            loops[name]()
            times[name].append((time.perf_counter() - start) / STEPS * 1e6)
    ratios = [mine / bare for mine, bare in zip(times["prepared"], times["bare"], strict=True)]
    return {name: statistics.median(values) for name, values in times.items()} | {
        "ratio": statistics.median(ratios)
    }


def report(library: str, result: dict[str, float]) -> None:
    print(
        f"{library:>10}: {result['prepared']:6.1f} us per step, bare PyTorch {result['bare']:6.1f} us, "
        f"ratio {result['ratio']:.3f}"
    )


def main() -> None:
    parser = options(__doc__, 15, "pairs of epochs to compare")
    parser.add_argument("--library", default="accel", help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true", help="print the figures only")
    arguments = parser.parse_args()
    result = measure(arguments.library, arguments.rounds)
    if arguments.json:
        print(json.dumps(result))
        return
    report(arguments.library, result)
    if arguments.reference_python:
        command = [str(arguments.reference_python), __file__, "--library", "accelerate", "--json"]
        command += ["--rounds", str(arguments.rounds)]
        report("accelerate", json.loads(subprocess.check_output(command, text=True).splitlines()[-1]))
    if result["ratio"] > CLAIM:
        sys.exit(f"more than the claimed {CLAIM}")


if __name__ == "__main__":
    main()
