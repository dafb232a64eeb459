"""The weights of offloaded blocks, streamed to a device: the next is copied while the present one computes.

A block's tensors lie in one flat buffer, which belongs to the copy stream and lives as long as somebody uses
it: until the block is released, or longer where autograd or an output holds a part of it. The copy of a block
waits until the computation has reached the end of the one before the present one: two are on the device.
Where the device has memory for one alone, the copy waits until the present block has run.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from accel_bigmodel.host_memory import available_host_memory
from accel_bigmodel.host_to_device import SLOT_BYTES, HostToDevice, Span, power_of_two
from accel_state.streams import pinned_if_possible

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from concurrent.futures import Future

    from torch import Tensor

    from accel_bigmodel.offload import OffloadedWeightsLoader
    from accel_bigmodel.stored_tensor import StoredTensor
    from accel_state.streams import DeviceStreams, Event

_ALIGNMENT = 512
"""Bytes; what CUDA's own allocations are aligned to."""

_PINNED_SHARE = 0.5
"""The part of the available host memory that blocks may keep pinned."""

_PINNED_CHUNK = 64 << 20
"""Bytes pinned at a time; torch rounds up to powers of two."""


@dataclass(slots=True, eq=False)
class _Unit:
    """Tensors that are copied together: those of one block alone, or one that several blocks share.

    Attributes:
        tensors: Names of each tensor, where it is stored, and where it begins in the buffer.
        nbytes: Bytes of the buffer.
        pinned: All its bytes in pinned memory, if they are kept there.
        users: How often it is acquired.
        transfer: Its copy, once it was started.
        values: The tensors on the device, while it is acquired.
        memory: The buffer, and what was cast from it.
    """

    tensors: list[tuple[list[str], StoredTensor, int]] = field(
        default_factory=list[tuple[list[str], "StoredTensor", int]]
    )
    nbytes: int = 0
    pinned: Tensor | None = None
    users: int = 0
    transfer: Future[tuple[Tensor, Event]] | None = None
    values: dict[str, Tensor] | None = None
    memory: list[Tensor] = field(default_factory=list["Tensor"])

    def add(self, names: list[str], stored: StoredTensor) -> None:
        """Append a tensor to the buffer."""
        self.tensors.append((names, stored, self.nbytes))
        self.nbytes += max(1, -(-stored.nbytes // _ALIGNMENT)) * _ALIGNMENT

    def spans(self, buffer: Tensor) -> list[Span]:
        """Return the spans to copy."""
        return [
            Span(source=stored, begin=0, target=buffer[begin : begin + stored.nbytes])
            for _, stored, begin in self.tensors
            if stored.nbytes
        ]

    def views(self, buffer: Tensor) -> dict[str, Tensor]:
        """See the tensors in a buffer, in the types that they are used in."""
        found: dict[str, Tensor] = {}
        for names, stored, begin in self.tensors:
            flat = buffer[begin : begin + stored.nbytes]
            value = flat.view(stored.stored).view(stored.shape).to(stored.dtype)
            found.update(dict.fromkeys(names, value))
        return found


class StreamedBlocks:
    """Streams blocks to a device.

    Weights that several blocks share are copied once while any of them is acquired or prefetched: an
    embedding that is tied to the head comes once per token.
    """

    def __init__(
        self,
        weights: OffloadedWeightsLoader,
        blocks: Mapping[str, Iterable[str]],
        streams: DeviceStreams,
    ) -> None:
        self._streams = streams
        self._lock = threading.RLock()
        self._worker = ThreadPoolExecutor(
            max_workers=1, thread_name_prefix="accel-prefetch", initializer=streams.set_current
        )
        self._on_device: dict[str, dict[str, Tensor]] = {}
        self._units = self._make_units(weights, blocks)
        self._prefetched: list[_Unit] = []
        self._released: list[Event] = []
        self._all = list(dict.fromkeys(unit for units in self._units.values() for unit in units))
        largest = max((stored.nbytes for unit in self._all for _, stored, _ in unit.tensors), default=0)
        slot_bytes = min(SLOT_BYTES, power_of_two(max(_ALIGNMENT, largest)))
        self._pipeline = HostToDevice(streams, slot_bytes=slot_bytes)
        self._pin(weights)

    def acquire(self, block: str) -> Mapping[str, Tensor]:
        """Let the current stream wait, on the device, until the block is copied."""
        with self._lock:
            units, before = self._units[block], self._prefetched
            self._prefetched = []
            for unit in units:
                unit.users += 1
            for unit in before:
                self._drop(unit)
            try:
                for unit in units:
                    self._start(unit)
                values = dict(self._on_device[block])
                for unit in units:
                    values.update(self._receive(unit))
            except BaseException:
                for unit in units:
                    unit.users -= 1
                    self._drop(unit)
                raise
            return values

    def release(self, block: str) -> None:
        """Let the memory be used again when this thread's current stream has done its work so far."""
        with self._lock:
            current = self._streams.current_stream()
            for unit in self._units[block]:
                unit.users -= 1
                for tensor in unit.memory:
                    self._streams.record_stream(tensor, current)
            done = self._streams.new_event()
            done.record(current)
            self._released.append(done)
            for unit in self._units[block]:
                self._drop(unit)

    def prefetch(self, block: str) -> None:
        """Start to copy a block in a thread."""
        with self._lock:
            self._prefetched = list(self._units[block])
            for unit in self._prefetched:
                self._start(unit)

    def _start(self, unit: _Unit) -> Future[tuple[Tensor, Event]]:
        if unit.transfer is None:
            after, self._released = self._released, []
            unit.transfer = self._worker.submit(_transfer, self._pipeline, unit, after)
        return unit.transfer

    def _receive(self, unit: _Unit) -> dict[str, Tensor]:
        try:
            buffer, ready = self._start(unit).result()
        except torch.OutOfMemoryError:
            # It was prefetched beside a block that is released by now: copy it when that one has run.
            unit.transfer = None
            buffer, ready = self._start(unit).result()
        current = self._streams.current_stream()
        current.wait_event(ready)
        if unit.values is None:
            unit.values = unit.views(buffer)
            casts = [unit.values[names[0]] for names, stored, _ in unit.tensors if stored.is_cast]
            unit.memory = [buffer, *casts]
            if casts:
                ready.record(current)  # the stream of another thread waits for the casts, too
        return unit.values

    def _drop(self, unit: _Unit) -> None:
        if not unit.users and unit not in self._prefetched:
            unit.transfer = unit.values = None
            unit.memory = []

    def _make_units(
        self, weights: OffloadedWeightsLoader, blocks: Mapping[str, Iterable[str]]
    ) -> dict[str, list[_Unit]]:
        names: dict[tuple[object, ...], list[str]] = {}
        users: dict[tuple[object, ...], list[str]] = {}
        stored: dict[tuple[object, ...], StoredTensor] = {}
        for block, members in blocks.items():
            self._on_device[block] = {}
            for name in members:
                found = weights.stored(name)
                if found.memory.device.type != "cpu":  # tied to a weight that stays on the device
                    self._on_device[block][name] = weights[name]
                    continue
                stored.setdefault(found.key, found)
                names.setdefault(found.key, []).append(name)
                if block not in users.setdefault(found.key, []):
                    users[found.key].append(block)
        units: dict[str, _Unit] = {block: _Unit() for block in blocks}
        shared: dict[str, list[_Unit]] = {block: [] for block in blocks}
        for key, tensor in stored.items():
            unit = units[users[key][0]] if len(users[key]) == 1 else _Unit()
            unit.add(names[key], tensor)
            if len(users[key]) > 1:
                for block in users[key]:
                    shared[block].append(unit)
        return {
            block: [*([units[block]] if units[block].tensors else []), *shared[block]] for block in blocks
        }

    def _pin(self, weights: OffloadedWeightsLoader) -> None:
        """Keep blocks that are in memory anyway in pinned memory instead, as far as the budget goes."""
        budget = int(available_host_memory() * _PINNED_SHARE)
        smallest = min(_PINNED_CHUNK, power_of_two(sum(unit.nbytes for unit in self._all)))
        chunk, used = None, 0
        weights.state_dict = state = dict(weights.state_dict)
        for unit in self._all:
            names = {name for held, _, _ in unit.tensors for name in held}
            if not unit.nbytes or not names <= weights.state_dict.keys():
                continue
            if chunk is None or used + unit.nbytes > chunk.numel():
                size = max(smallest, power_of_two(unit.nbytes))
                if size > budget:
                    continue
                chunk, used, budget = pinned_if_possible(self._streams, size), 0, budget - size
                if chunk is None:
                    break
            unit.pinned = chunk[used : used + unit.nbytes]
            used += unit.nbytes
            for index, (names, stored, begin) in enumerate(unit.tensors):
                view = unit.pinned[begin : begin + stored.nbytes].view(stored.stored).view(stored.shape)
                view.copy_(stored.memory)
                # The first copies go as soon as nobody else has them.
                unit.tensors[index] = (names, replace(stored, memory=view), begin)
                state.update(dict.fromkeys(names, view))


def _transfer(pipeline: HostToDevice, unit: _Unit, after: Sequence[Event]) -> tuple[Tensor, Event]:
    """Run in the worker: wait until the memory of earlier blocks is free, and copy the unit."""
    for event in after:
        event.synchronize()
    streams = pipeline.streams
    with streams.on(pipeline.stream):
        buffer = streams.empty(unit.nbytes)
    if unit.pinned is not None:
        pipeline.copy_pinned(unit.pinned, buffer)
    else:
        pipeline.copy(unit.spans(buffer))
    ready = streams.new_event()
    ready.record(pipeline.stream)
    return buffer, ready
