"""Overhead of the hang explainer, relative to a small all_reduce and a small training step.

    uv run python tools/benchmarks/hang_explainer.py

Two processes, gloo, on the CPU. A region is timed alone, in the best of many short loops, since a microsecond
drowns in the spread of what it is compared with: one all_reduce of 1 KB, and one DDP step (4 layers of 256,
batch 32; two regions a step: the backward pass and a gather of the loss), both in torch alone. The CPU
time of the monitor thread is read from its own clock. Claim: both together are under 1 % of the step.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from accel_state import PartialState
from accel_state.hang_monitor import collective_scope
from accel_state.topology import free_port

if TYPE_CHECKING:
    from collections.abc import Callable

WORLD = 2
REGIONS_PER_STEP = 2
SECONDS = 5.0  # for which the thread on the side is observed


def time_of(call: Callable[[], object], calls: int) -> float:
    """Microseconds per call of one loop."""
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - begin) / calls * 1e6


def in_region() -> None:
    """Nothing, in a region, as deep in calls as a gather of nested data is."""

    def deeper(levels: int) -> None:
        if levels:
            deeper(levels - 1)
        else:
            with collective_scope("all_gather"):
                pass

    deeper(4)


def without_region() -> None:
    """The same calls without the region."""

    def deeper(levels: int) -> None:
        if levels:
            deeper(levels - 1)

    deeper(4)


def training_step() -> Callable[[], object]:
    """A step of plain DDP."""
    model = nn.parallel.DistributedDataParallel(nn.Sequential(*[nn.Linear(256, 256) for _ in range(4)]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batch, gathered = torch.randn(32, 256), torch.empty(WORLD)

    def step() -> None:
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        dist.all_gather_into_tensor(gathered, loss.detach().view(1))

    return step


def thread_share() -> float:
    """The part of one core that the thread on the side uses."""
    thread = next(thread for thread in threading.enumerate() if thread.name == "accel-hang-monitor")
    assert thread.ident is not None
    clock = time.pthread_getcpuclockid(thread.ident)
    begin = time.clock_gettime(clock)
    time.sleep(SECONDS)
    return (time.clock_gettime(clock) - begin) / SECONDS


def measure() -> None:
    """Run on each rank; rank 0 prints."""
    state = PartialState(cpu=True)
    tensor, step = torch.ones(256), training_step()
    cost = min(time_of(in_region, 2000) for _ in range(50)) - min(
        time_of(without_region, 2000) for _ in range(50)
    )
    state.wait_for_everyone()
    reduce = statistics.median(time_of(lambda: dist.all_reduce(tensor), 100) for _ in range(30))
    small = statistics.median(time_of(step, 20) for _ in range(15))
    share = thread_share()
    total = cost * REGIONS_PER_STEP / small + share
    if state.is_main_process:
        print(f"one region                       {cost:8.2f} us")
        print(f"all_reduce of 1 KB, plain torch  {reduce:8.1f} us   ratio with it {1 + cost / reduce:.4f}")
        print(f"small DDP step, plain torch      {small:8.1f} us")
        print(f"thread on the side               {share:8.4%} of a core")
        result = "ok" if total < 0.01 else "MISSED"
        print(f"the step with the explainer: ratio {1 + total:.4f} (claim: 1.01) {result}")
    state.destroy_process_group()


def main() -> int:
    """Start the ranks."""
    if "RANK" in os.environ:
        measure()
        return 0
    port = free_port()
    common = {"WORLD_SIZE": str(WORLD), "LOCAL_WORLD_SIZE": str(WORLD), "MASTER_ADDR": "127.0.0.1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve())],
            env=os.environ
            | common
            | {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"},
        )
        for rank in range(WORLD)
    ]
    return max(process.wait() for process in ranks)


if __name__ == "__main__":
    sys.exit(main())
