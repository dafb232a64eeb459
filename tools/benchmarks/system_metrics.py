"""Overhead of `Accelerator(log_system_metrics=True)` per training step.

    uv run python tools/benchmarks/system_metrics.py [--rounds N]

The same loop (loader, forward and backward pass, optimizer, a log per step to a tracker that does nothing)
with the metrics and without takes turns in one process. The model is so small that nearly all of a step is
overhead; the claim is about a step of a millisecond, which is short.

Claim: at most 10 us per step, 1 % of a millisecond.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from accel_trackers import GeneralTracker
from accel_train import Accelerator

if TYPE_CHECKING:
    from collections.abc import Callable

CLAIM = 10.0  # microseconds
STEPS = 200


class Nothing(GeneralTracker):
    """A tracker that does nothing."""

    name = "nothing"
    requires_logging_directory = False

    @property
    def tracker(self) -> Any:
        """There is none."""
        return None


def loop(*, metrics: bool) -> Callable[[], float]:
    """A training loop; what is returned runs it and returns microseconds per step."""
    accelerator = Accelerator(cpu=True, log_with=Nothing(), log_system_metrics=metrics)
    accelerator.init_trackers("run")
    model = torch.nn.Linear(8, 8)
    data = DataLoader(TensorDataset(torch.ones(2 * STEPS, 8)), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), data)

    def run() -> float:
        begin = time.perf_counter()
        for step, (batch,) in enumerate(loader):
            loss = model(batch).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            accelerator.log({"loss": loss}, step=step)
        return (time.perf_counter() - begin) / STEPS * 1e6

    return run


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=60, help="pairs to compare")
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    plain, measured = loop(metrics=False), loop(metrics=True)
    plain()
    measured()
    pairs = [(plain(), measured()) for _ in range(rounds)]
    more = statistics.median(two - one for one, two in pairs)
    fastest = min(two for _, two in pairs) - min(one for one, _ in pairs)
    print(f"a step without metrics: {min(one for one, _ in pairs):.1f} us at the fastest")
    print(f"metrics per step: {more:.2f} us median, {fastest:.2f} us between the fastest")
    if min(more, fastest) > CLAIM:
        sys.exit(f"more than the claimed {CLAIM} us")


if __name__ == "__main__":
    main()
