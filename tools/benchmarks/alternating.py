"""Run a benchmark on several ranks, alternating the compared variants within each rank."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor


def compare(loops: Sequence[Callable[[], Tensor]], *, rounds: int, steps: int, claim: float) -> None:
    """Print the times of accel and of a program written by hand, and the median of their ratio.

    Args:
        loops: Both, of as many steps; each returns its losses, which have to be close.
        rounds: Number of pairs of runs, after two that do not count.
        steps: Number of steps of a run.
        claim: The largest ratio that the page of benchmarks claims.
    """
    pairs: list[tuple[float, float]] = []
    for index in range(rounds + 2):
        times: list[float] = []
        losses: list[Tensor] = []
        for loop in loops:
            dist.barrier()
            start = time.perf_counter()
            losses.append(loop())
            times.append((time.perf_counter() - start) / steps)
        torch.testing.assert_close(*losses)
        if index >= 2:
            pairs.append((times[0], times[1]))
    ratio = statistics.median(ours / bare for ours, bare in pairs)
    if dist.get_rank() == 0:
        ours, bare = (1000 * statistics.median(values) for values in zip(*pairs, strict=True))
        print(f"accel {ours:.1f} ms, by hand {bare:.1f} ms a step: {ratio:.3f} (claim: at most {claim})")


def alternate(
    steps: Mapping[str, Callable[[], object]], *, rounds: int, calls: int
) -> dict[str, list[float]]:
    """Return the seconds of a call of each step, in every round but the first two; who begins alternates."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(rounds + 2):
        for name in [*steps] if turn % 2 else reversed([*steps]):
            dist.barrier()
            start = time.perf_counter()
            for _ in range(calls):
                steps[name]()
            if turn >= 2:
                times[name].append((time.perf_counter() - start) / calls)
    return times


def run_on_ranks(file: str, ranks: int, *arguments: str) -> Any:
    """Run a file with `--worker` and arguments on CPU ranks; return the JSON that rank 0 prints last."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(ranks), "--standalone"]
    done = subprocess.run(
        [*command, file, "--worker", *arguments],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"},
    )
    return json.loads(done.stdout.strip().splitlines()[-1])
