"""The main speed figures in one table: training loop, `load_state`, device map, import.

    uv run python tools/benchmarks/speed_table.py [--reference-python PATH]

Each library runs in fresh processes that alternate; printed are the fastest and the median of them. Claims:

- the prepared loop adds at most 6 us to a step of plain PyTorch, which takes 100 to 200 us;
- `load_state` with verification takes no longer than the reference's, which verifies nothing: the first of a
  process, as of a run that resumes, and later ones, which get back memory that the earlier ones have used;
- a device map of 16,000 modules takes at most 0.04 of the reference's time;
- `from accel import Accelerator` takes at most 1.05 of `import torch`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

STEPS = 300
CLAIMS = {
    "loop, us added per step": 6.0,
    "first load_state of 400 MB, s": 1.0,
    "later load_state, s": 1.0,
    "device map, 16,000 modules, s": 0.04,
    "import, of `import torch`": 1.05,
}
RELATIVE = ("first load_state of 400 MB, s", "later load_state, s", "device map, 16,000 modules, s")
"""Claimed beside the reference's; the others are claimed by themselves."""
TOUCH_MEMORY = "bytearray(b'1') * (3 << 30)"
"""A virtual machine that gives free memory back gets it again slowly: 0.3 s for whoever comes first."""


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def import_ratio(library: str) -> float:
    """Time of the import over that of torch's, which it includes."""
    torch = seconds(lambda: import_module("torch"))
    return 1 + seconds(lambda: import_module(library).Accelerator) / torch


def loop_overhead(library: str) -> float:
    """Microseconds of CPU time that the prepared loop adds to a step: the median of each of the two loops."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    def parts() -> Any:
        torch.manual_seed(0)
        model = torch.nn.Linear(8, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, foreach=False)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1000)
        data = TensorDataset(torch.randn(STEPS * 2, 8))
        return model, optimizer, DataLoader(data, batch_size=2, shuffle=True), scheduler

    model, optimizer, loader, scheduler = parts()
    accelerator = import_module(library).Accelerator(cpu=True)
    prepared = accelerator.prepare(*parts())

    def plain() -> None:
        for (inputs,) in loader:
            loss = model(inputs).sum()
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

    def through_accelerator() -> None:
        model, optimizer, loader, scheduler = prepared
        for (inputs,) in loader:
            with accelerator.accumulate(model):
                loss = model(inputs).sum()
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

    torch.set_num_threads(1)
    times: dict[Callable[[], None], list[float]] = {plain: [], through_accelerator: []}
    for turn in range(40):
        for loop in sorted(times, key=lambda loop: loop.__name__, reverse=turn % 2 == 1):
            begin = time.thread_time()
            loop()
            times[loop].append((time.thread_time() - begin) / STEPS * 1e6)
    return statistics.median(times[through_accelerator]) - statistics.median(times[plain])


def trained(library: str) -> Any:
    """Return an accelerator with a model of 133 MB and the state of AdamW, prepared."""
    import torch

    accelerator = import_module(library).Accelerator(cpu=True)
    torch.set_num_threads(2)
    model = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048, bias=False) for _ in range(8)))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return accelerator


def load_times(library: str) -> list[float]:
    """The first load of a process, and the fastest of the next ones, all from the page cache."""
    with tempfile.TemporaryDirectory() as folder:
        trained(library).save_state(f"{folder}/state")
        os.sync()
        subprocess.run([sys.executable, "-c", TOUCH_MEMORY], check=True)
        times = answer(sys.executable, "--library", library, "--load", f"{folder}/state")
    return [times[0], min(times[1:])]


def load_repeatedly(library: str, folder: str) -> list[float]:
    accelerator = trained(library)
    return [seconds(lambda: accelerator.load_state(folder)) for _ in range(8)]


def map_time(library: str) -> float:
    """Fastest of two device maps."""
    from torch import nn

    big = import_module(library)
    memory = {0: int(3e6), 1: int(3e6), "cpu": 10**9}
    with big.init_empty_weights():
        model = nn.Sequential(
            *(nn.Sequential(*(nn.Linear(16, 16) for _ in range(20))) for _ in range(16_000 // 20))
        )
    return min(seconds(lambda: big.infer_auto_device_map(model, memory)) for _ in range(2))


def measure(library: str) -> list[float]:
    """Measure all in this process, the import first; in the order of `CLAIMS`."""
    ratio = import_ratio(library)
    return [loop_overhead(library), *load_times(library), map_time(library), ratio]


def answer(python: str, *arguments: str) -> list[float]:
    """Run this file in another process."""
    command = [python, __file__, *arguments]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3, help="processes of each library")
    parser.add_argument("--reference-python", help="interpreter of an environment with the reference")
    parser.add_argument("--library", help=argparse.SUPPRESS)
    parser.add_argument("--load", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.library:
        library, folder = arguments.library, arguments.load
        print(json.dumps(load_repeatedly(library, folder) if folder else measure(library)))
        return
    libraries = {"accel": sys.executable}
    if arguments.reference_python:
        libraries["accelerate"] = arguments.reference_python
    runs: dict[str, list[dict[str, float]]] = {library: [] for library in libraries}
    for _ in range(arguments.rounds):
        for library, python in libraries.items():
            runs[library].append(dict(zip(CLAIMS, answer(python, "--library", library), strict=True)))
    missed: list[str] = []
    for name, claim in CLAIMS.items():
        best = {library: min(one[name] for one in found) for library, found in runs.items()}
        figures = [
            f"{library} {best[library]:.4g} (median {statistics.median(one[name] for one in found):.4g})"
            for library, found in runs.items()
        ]
        value = best["accel"] / best.get("accelerate", float("nan")) if name in RELATIVE else best["accel"]
        print(f"{name:>30}: {', '.join(figures)}; claimed {claim}, found {value:.3f}")
        if value > claim:
            missed.append(name)
    if missed:
        sys.exit(f"not as claimed: {', '.join(missed)}")


if __name__ == "__main__":
    main()
