"""Measure transfer speeds: between ranks, and between host and device."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING

import torch

from accel_state import runtime
from accel_state.streams import device_streams, synchronize

if TYPE_CHECKING:
    from collections.abc import Callable

_ROUNDS = 5
_REDUCED = {"cpu": 8 << 20}
_MANY = 64 << 20
_COPIED = 256 << 20


def speeds() -> dict[str, float]:
    """Measure on all ranks at once.

    Returns:
        Bytes per second. That of all-reduce is the bus bandwidth, 2 (n-1)/n times the bytes of the tensor
        (github.com/NVIDIA/nccl-tests, PERFORMANCE.md), so that it can be compared with that of links.
    """
    current = runtime.current()
    device, size = current.device, current.topology.world_size
    found: dict[str, float] = {}
    if size > 1:
        tensor = torch.ones(_REDUCED.get(device.type, _MANY) // 4, device=device)
        seconds = _median(lambda: current.collectives.all_reduce(tensor.zero_()), device)
        found["all-reduce"] = tensor.nbytes * 2 * (size - 1) / size / seconds
    if device.type != "cpu":
        on_device = torch.empty(_COPIED, dtype=torch.uint8, device=device)
        pageable = torch.zeros(_COPIED, dtype=torch.uint8)
        found["host to device"] = _COPIED / _median(lambda: on_device.copy_(pageable), device)
        if (streams := device_streams(device)) is not None:
            pinned = streams.pinned(_COPIED)
            found["host to device, pinned"] = _COPIED / _median(
                lambda: streams.copy_(on_device, pinned), device
            )
            found["device to host, pinned"] = _COPIED / _median(
                lambda: streams.copy_(pinned, on_device), device
            )
    return found


def _median(action: Callable[[], object], device: torch.device) -> float:
    """Return the median seconds of an action, without the first run."""
    times: list[float] = []
    for _ in range(_ROUNDS + 1):
        synchronize(device)
        start = time.perf_counter()
        action()
        synchronize(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])
