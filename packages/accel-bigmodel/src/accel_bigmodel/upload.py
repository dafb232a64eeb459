"""From a file to an accelerator: threads read into pinned slots, a stream of their own copies them on."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from accel_bigmodel.pinned import Device
    from accel_ops.weights.safetensors_file import SafetensorsFile

SLOT_BYTES = 32 << 20
SLOTS = 4
"""Large enough for full bandwidth on both sides, small enough that pinning them is quick."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Bytes of one tensor in its file, and where they go in its block on the device."""

    begin: int
    target: Tensor


def upload(
    file: SafetensorsFile,
    names: Sequence[str],
    device: torch.device,
    *,
    module: Device | None = None,
    pin: bool = True,
) -> dict[str, Tensor]:
    """Bring tensors of a file to an accelerator.

    Tensors are views of one block of device memory. The file is read with large plain reads, never mapped:
    copying from a mapping is several times slower.

    Args:
        file: The file.
        names: Which of its tensors.
        device: Where to.
        module: The device's streams and events; by default torch's.
        pin: Whether host buffers are pinned; only tests without a driver say no.
    """
    streams: Any = torch.get_device_module(device) if module is None else module
    order = sorted(names, key=lambda name: file.entries[name].begin)
    found = {
        name: torch.empty(file.entries[name].shape, dtype=file.entries[name].dtype, device=device)
        for name in order
    }
    spans = [span for name in order for span in _spans(file, name, found[name])]
    side = streams.Stream(device)
    # Device memory that is in use on the present stream may be handed to us: copies come after that.
    side.wait_stream(streams.current_stream(device))
    slots = [
        (torch.empty(SLOT_BYTES, dtype=torch.uint8, pin_memory=pin), streams.Event())
        for _ in range(min(SLOTS, len(spans)))
    ]

    def bring(worker: int) -> None:
        buffer, done = slots[worker]
        for span in spans[worker :: len(slots)]:
            done.synchronize()  # the slot's last copy is over
            host = buffer[: span.target.numel()]
            file.read_into(host, span.begin)
            with streams.stream(side):
                span.target.copy_(host, non_blocking=True)
            done.record(side)
        done.synchronize()

    if slots:
        with ThreadPoolExecutor(max_workers=len(slots), thread_name_prefix="accel-upload") as pool:
            list(pool.map(bring, range(len(slots))))
    streams.current_stream(device).wait_stream(side)
    return found


def _spans(file: SafetensorsFile, name: str, tensor: Tensor) -> list[Span]:
    flat = tensor.view(-1).view(torch.uint8) if tensor.numel() else tensor.view(-1)
    begin = file.entries[name].begin
    return [
        Span(begin=begin + start, target=flat[start : start + SLOT_BYTES])
        for start in range(0, flat.numel() if tensor.numel() else 0, SLOT_BYTES)
    ]
