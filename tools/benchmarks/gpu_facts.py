"""Describe the machine, and measure the bandwidth limits of its GPU, bus and disk.

    python tools/benchmarks/gpu_facts.py [--small]

Printed are bandwidths of copies (pinned and pageable, both ways, and within the device), of reading a file
that is in the page cache, and of a matrix product in bfloat16. `--small`: small sizes, on the CPU.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

REPEATS = 7


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """The median time of some work, until the device has done it."""
    times: list[float] = []
    for _ in range(REPEATS):
        synchronize(device)
        start = time.perf_counter()
        work()
        synchronize(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times[2:])


def synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize()


def device_for(*, small: bool) -> torch.device:
    """The accelerator; the CPU where everything is small."""
    accelerator = torch.accelerator.current_accelerator() if not small else None
    return torch.device("cpu") if accelerator is None else torch.device(accelerator.type, 0)


def copy_bandwidth(nbytes: int, device: torch.device, *, pinned: bool = True, back: bool = False) -> float:
    """Bytes per second from the host to the device, or back."""
    host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned and device.type != "cpu")
    there = torch.empty_like(host, device=device)
    source, target = (there, host) if back else (host, there)
    return nbytes / seconds(lambda: target.copy_(source, non_blocking=pinned), device)


def read_bandwidth(file: Path) -> float:
    """Bytes per second of reading a file, the second time."""
    best = 0.0
    buffer = bytearray(16 << 20)
    for _ in range(2):
        start, total = time.perf_counter(), 0
        with file.open("rb", buffering=0) as stream:
            while got := stream.readinto(buffer):
                total += got
        best = max(best, total / (time.perf_counter() - start))
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--small", action="store_true", help="small sizes, on the CPU")
    small = parser.parse_args().small
    device = device_for(small=small)
    nbytes, width = (1 << 20, 128) if small else (1 << 28, 8192)
    print(
        f"{platform.platform()}, {os.cpu_count()} cores, Python {platform.python_version()}, "
        f"torch {torch.__version__}"
    )
    if device.type == "cuda":
        facts: Any = torch.cuda.get_device_properties(device)
        print(
            f"{facts.name}, {facts.total_memory / 1e9:.1f} GB, "
            f"{facts.multi_processor_count} multiprocessors, CUDA {torch.version.cuda}"
        )
    for pinned in (True, False):
        for back in (False, True):
            rate = copy_bandwidth(nbytes, device, pinned=pinned, back=back)
            print(
                f"copy {'to the host' if back else 'to the device'}, {'pinned' if pinned else 'pageable'}: "
                f"{rate / 1e9:.2f} GB/s"
            )
    first = torch.empty(nbytes, dtype=torch.uint8, device=device)
    second = torch.empty_like(first)
    within = 2 * nbytes / seconds(lambda: second.copy_(first), device)
    print(f"copy within the device, bytes read and written: {within / 1e9:.1f} GB/s")
    matrix = torch.randn(width, width, device=device, dtype=torch.bfloat16)
    product = 2 * width**3 / seconds(lambda: matrix @ matrix, device)
    print(f"matrix product of {width} in bfloat16: {product / 1e12:.2f} TFLOP/s")
    with tempfile.NamedTemporaryFile() as file:
        file.write(os.urandom(nbytes))
        file.flush()
        print(f"read of a file in the page cache: {read_bandwidth(Path(file.name)) / 1e9:.2f} GB/s")


if __name__ == "__main__":
    main()
