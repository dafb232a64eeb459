"""Device memory and time per step of HostAdamW, for a stack of linear layers.

    uv run python tools/benchmarks/host_adamw.py [--width 1024] [--layers 8] [--rounds 7]

Peak memory of the device is that of the live storages of a training step (the tracker of `accel check`) and,
for torch's AdamW, of its state; the state of HostAdamW is counted as the host's. The baseline is
`torch.optim.AdamW` of the same model in float32. Time is the median of a step; on a CPU the device and the
host are the same cores, so that nothing overlaps. Claim: the device's peak is at most half of the baseline's.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from typing import Any

import torch
from torch import nn

from accel_cli.commands.estimate.trace import LiveStorageTracker
from accel_plugins.optimizers.host_adamw import HostAdamW

CLAIM = 0.5


class PeakTracker(LiveStorageTracker):
    """The most bytes that are alive on the device after an operation."""

    peak = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation, and note the bytes that are alive after it."""
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self.peak = max(self.peak, self.device_bytes)
        return result


def main(argv: list[str]) -> int:
    """Measure all ways, print them beside the baseline, and return 0 if the claim holds."""
    parser = argparse.ArgumentParser(description="Memory and time of AdamW on the host.")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args(argv)
    rows = {
        "torch.optim.AdamW, float32": measure(options, torch.float32, torch.optim.AdamW),
        "torch.optim.AdamW, bfloat16": measure(options, torch.bfloat16, torch.optim.AdamW),
        "HostAdamW, bfloat16": measure(options, torch.bfloat16, HostAdamW),
        "HostAdamW, bfloat16, no overlap": measure(options, torch.bfloat16, HostAdamW, overlap=False),
    }
    (base, _, base_time), *_ = rows.values()
    print(f"{'':34} {'device':>10} {'ratio':>6} {'host':>10} {'step':>9} {'ratio':>6}")
    for name, (device, host, seconds) in rows.items():
        print(
            f"{name:34} {device / 1e6:7.1f} MB {device / base:6.2f} {host / 1e6:7.1f} MB "
            f"{seconds * 1e3:6.1f} ms {seconds / base_time:6.2f}"
        )
    worst = max(device for device, _, _ in [*rows.values()][2:]) / base
    print(f"device's peak, of the baseline's: {worst:.2f} (claim: at most {CLAIM})")
    return 0 if worst <= CLAIM else 1


def measure(
    options: argparse.Namespace, dtype: torch.dtype, make: Any, **arguments: Any
) -> tuple[int, int, float]:
    """Return the peak bytes of the device, the bytes of state on the host, and the seconds of a step."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(options.width, options.width) for _ in range(options.layers))).to(dtype)
    optimizer = make(model.parameters(), lr=1e-3, **arguments)
    batch = torch.randn(64, options.width, dtype=dtype)

    def step() -> None:
        model(batch).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    tracker = PeakTracker(None)
    tracker.add(model)
    with tracker:
        step()
    state = sum(value.nbytes for values in optimizer.state.values() for value in values.values())
    on_host = isinstance(optimizer, HostAdamW)
    seconds: list[float] = []
    for _ in range(options.rounds):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    return tracker.peak + (0 if on_host else state), state if on_host else 0, statistics.median(seconds)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
