"""Acquire, prefetch and release blocks of offloaded weights.

The tensors of a block are in one flat buffer, which belongs to the copy stream and is freed when the block is
released, or later if autograd or an output holds a slice of it. The copy of the next block waits until the
block before the current one has been computed: two blocks are on the device. If the device has memory for
only one block, the copy waits until the current block has run.

A thread may use a block after acquiring it, and may acquire it again; it releases the block after it has
issued the last use.
"""

from __future__ import annotations

import copy
import os
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from accel_bigmodel.align import AlignDevicesHook, OffloadedTensor, align_hooks_of
from accel_bigmodel.hooks import add_hook_to_module
from accel_bigmodel.host_to_device import SLOT_BYTES, HostToDevice, Span, available_host_memory, power_of_two
from accel_bigmodel.offload import OffloadedWeightsLoader, StoredTensor
from accel_bigmodel.sizes import CONTAINERS
from accel_ops.weights.read import entry_of
from accel_ops.weights.safetensors_io import SafetensorsFile
from accel_state.errors import SettingsError
from accel_state.streams import DeviceStreams, Event, device_streams, pinned_if_possible
from accel_state.torch_private import buffer_table, child_table, parameter_table

_ALIGNMENT = 512
"""Bytes; the alignment of CUDA's allocations."""

_PINNED_SHARE = 0.5
"""The fraction of the available host memory that blocks may keep pinned."""

_PINNED_CHUNK = 64 << 20
"""Bytes pinned at a time; torch rounds up to powers of two."""


@dataclass(slots=True, eq=False)
class _Unit:
    """Tensors that are copied together: those of one block only, or a tensor shared by several blocks.

    Attributes:
        tensors: Names, storage and offset in the buffer of each tensor.
        nbytes: Bytes of the buffer.
        pinned: A copy of the buffer in pinned memory, if it is kept there.
        users: Number of acquisitions.
        transfer: The pending or finished copy.
        values: The tensors on the device, while it is acquired.
        memory: The buffer, and the tensors cast from it.
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
        """Return the tensors of a buffer as views, cast where they are used in another dtype."""
        values: dict[str, Tensor] = {}
        for names, stored, begin in self.tensors:
            flat = buffer[begin : begin + stored.nbytes]
            value = flat.view(stored.stored).view(stored.shape).to(stored.dtype)
            values.update(dict.fromkeys(names, value))
        return values


class StreamedBlocks:
    """Streams blocks of offloaded weights to a device.

    Weights that several blocks share are copied once while any of these blocks is acquired or prefetched: an
    embedding tied to the head is copied once per token.
    """

    def __init__(
        self,
        weights: OffloadedWeightsLoader,
        blocks: Mapping[str, Iterable[str]],
        streams: DeviceStreams,
    ) -> None:
        self._streams = streams
        self._weights = weights
        self._blocks = {block: [*names] for block, names in blocks.items()}
        self._lock = threading.RLock()
        self._worker = ThreadPoolExecutor(
            max_workers=1, thread_name_prefix="accel-prefetch", initializer=streams.set_current
        )
        self._on_device: dict[str, dict[str, Tensor]] = {}
        self._units = self._make_units(weights, self._blocks)
        self._prefetched: list[_Unit] = []
        self._released: list[Event] = []
        self._all = list(dict.fromkeys(unit for units in self._units.values() for unit in units))
        largest = max((stored.nbytes for unit in self._all for _, stored, _ in unit.tensors), default=0)
        slot_bytes = min(SLOT_BYTES, power_of_two(max(_ALIGNMENT, largest)))
        self._pipeline = HostToDevice(streams, slot_bytes=slot_bytes)
        self._pin(weights)

    def __deepcopy__(self, memo: dict[int, Any]) -> StreamedBlocks:
        return StreamedBlocks(copy.deepcopy(self._weights, memo), self._blocks, self._streams)

    def acquire(self, block: str) -> Mapping[str, Tensor]:
        """Return the tensors of a block; the current stream waits, on the device, until they are copied."""
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
        """Allow the memory to be reused after the work submitted to this thread's current stream so far."""
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
        """Start to copy a block in a worker thread."""
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
            # It was prefetched while a block was acquired that is released now: copy it after that block.
            unit.transfer = None
            buffer, ready = self._start(unit).result()
        current = self._streams.current_stream()
        current.wait_event(ready)
        if unit.values is None:
            unit.values = unit.views(buffer)
            casts = [unit.values[names[0]] for names, stored, _ in unit.tensors if stored.is_cast]
            unit.memory = [buffer, *casts]
            if casts:
                ready.record(current)  # streams of other threads must also wait for the casts
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
                location = weights.stored(name)
                if location.memory.device.type != "cpu":  # tied to a resident weight
                    self._on_device[block][name] = weights[name]
                    continue
                stored.setdefault(location.key, location)
                names.setdefault(location.key, []).append(name)
                if block not in users.setdefault(location.key, []):
                    users[location.key].append(block)
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
        """Move blocks that are in host memory to pinned memory, within the budget."""
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
                # The unpinned tensors are freed with their last reference.
                unit.tensors[index] = (names, replace(stored, memory=view), begin)
                state.update(dict.fromkeys(names, view))


def _transfer(pipeline: HostToDevice, unit: _Unit, after: Sequence[Event]) -> tuple[Tensor, Event]:
    """Wait, in the worker thread, until the memory of earlier blocks is free, and copy the unit."""
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


class MappedBlocks:
    """Weights of blocks that execute on the CPU (or on a device without streams).

    A weight that is not cast is a view of the mapped file; a thread prefetches the next block. A weight that
    is cast is read and cast by the prefetch, and dropped when its block is released.

    Args:
        limit: Bytes of offloaded weights that may be in memory; by default the kernel decides.

    Raises:
        SettingsError: A block does not fit in the limit.
    """

    def __init__(
        self,
        weights: OffloadedWeightsLoader,
        blocks: Mapping[str, Iterable[str]],
        device: torch.device,
        limit: int | None = None,
    ) -> None:
        self._weights = weights
        self._device = device
        self._limit = limit
        self.start_thread()
        self._holds: dict[str, int] = {}
        self._mapped: dict[str, list[str]] = {}
        self._cast: dict[str, list[str]] = {}
        self._resident: dict[str, int] = {}
        self._sizes: dict[str, tuple[int, int]] = {}
        for block, names in blocks.items():
            stored = {name: weights.stored(name) for name in names}
            self._mapped[block] = [name for name, tensor in stored.items() if not tensor.is_cast]
            self._cast[block] = [name for name, tensor in stored.items() if tensor.is_cast]
            mapped = sum(stored[name].nbytes for name in self._mapped[block] if weights.file_of(name))
            cast = [t for t in stored.values() if t.is_cast]
            # Each is read before it is cast, one tensor at a time.
            extra = sum(t.cast_nbytes for t in cast) + max((t.nbytes for t in cast), default=0)
            self._sizes[block] = (mapped, mapped + extra)
        largest = max(self._sizes, key=lambda block: self._sizes[block][1], default=None)
        if limit is not None and largest is not None and self._sizes[largest][1] > limit:
            raise SettingsError(
                f"the memory limit of {limit} bytes is less than block {largest!r} needs, which is "
                f"{self._sizes[largest][1]}: raise the limit, or split the block in the device_map"
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> MappedBlocks:
        blocks = {block: [*names, *self._cast[block]] for block, names in self._mapped.items()}
        return MappedBlocks(copy.deepcopy(self._weights, memo), blocks, self._device, self._limit)

    def start_thread(self) -> None:
        """Create the thread that prefetches; again in a forked child, which inherits no thread."""
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="accel-read-ahead")
        self._lock = threading.RLock()
        self._pending: dict[str, Future[dict[str, Tensor]]] = {}

    def acquire(self, block: str) -> Mapping[str, Tensor]:
        """Return the mapped and the cast tensors of a block."""
        with self._lock:
            self._holds[block] = self._holds.get(block, 0) + 1
            pending = self._pending.pop(block, None)
            try:
                self._evict_until_fits(block)
                cast = self._load(block) if pending is None else pending.result()
            except BaseException:
                self.release(block)
                raise
        values = {**{name: self._weights[name] for name in self._mapped[block]}, **cast}
        return {name: value.to(self._device) for name, value in values.items()}

    def release(self, block: str) -> None:
        """Keep mapped pages within the limit; drop cast tensors with their last user."""
        with self._lock:
            self._holds[block] -= 1
            if not self._holds[block]:
                del self._holds[block]
                if block in self._resident:
                    self._resident[block] = self._sizes[block][0]

    def prefetch(self, block: str) -> None:
        """Read a block in a thread, if it fits in addition to the blocks in use."""
        with self._lock:
            if block in self._pending or block in self._holds:
                return
            used = sum(self._sizes[held][1] for held in {*self._holds, *self._pending})
            if self._limit is not None and used + self._sizes[block][1] > self._limit:
                return
            self._evict_until_fits(block)
            self._pending[block] = self._reader.submit(self._load, block)

    def _load(self, block: str) -> dict[str, Tensor]:
        for file, names in self._files(block):
            file.read_ahead(names)
        return {name: self._weights[name] for name in self._cast[block]}

    def _evict_until_fits(self, block: str) -> None:
        """Evict blocks that are not in use, least recently used first."""
        if self._limit is None:
            return
        self._resident.pop(block, None)
        free = self._limit - self._sizes[block][1]
        for old in list(self._resident):
            if sum(self._resident.values()) <= free:
                break
            if old not in self._holds:
                self._evict(old)
        taken = sum(self._resident.values())
        if taken > free:
            raise SettingsError(
                f"the memory limit of {self._limit} bytes has no room for block {block!r} beside "
                f"{', '.join(map(repr, self._resident))}, which run at the same time: raise the limit"
            )
        self._resident[block] = self._sizes[block][1]

    def _evict(self, block: str) -> None:
        pending = self._pending.pop(block, None)
        if pending is not None:
            pending.result()
        del self._resident[block]
        for file, names in self._files(block):
            file.evict(names)

    def _files(self, block: str) -> list[tuple[SafetensorsFile, list[str]]]:
        files: dict[int, tuple[SafetensorsFile, list[str]]] = {}
        for name in self._mapped[block]:
            located = self._weights.file_of(name)
            if located is not None:
                files.setdefault(id(located[0]), (located[0], []))[1].append(located[1])
        return list(files.values())


class OffloadedBlock:
    """One offloaded block. The hooks of its root and submodules hold it while their forward runs.

    Any number of threads may hold it; the last one releases the weights.
    """

    def __init__(self, name: str, order: BlockOrder, device: torch.device) -> None:
        self.name = name
        self.device = device
        self._order = order
        self._lock = threading.RLock()
        self._holds: dict[int, int] = {}
        self._members: list[tuple[AlignDevicesHook, Mapping[str, Any], str, list[OffloadedTensor]]] = []
        _blocks.add(self)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_lock": None, "_holds": {}}  # a copy of the model is not running

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lock=threading.RLock())
        _blocks.add(self)

    def reset_in_child(self) -> None:
        """Replace threads and locks, and end the forwards of other threads, which a forked child lacks."""
        self._lock = threading.RLock()
        weights = self._order.weights
        if isinstance(weights, MappedBlocks):  # a device cannot be used in a forked child
            weights.start_thread()
            for thread in self._holds.keys() - {threading.get_ident()}:
                del self._holds[thread]
                weights.release(self.name)
            if not self._holds:
                self._leave()

    @property
    def is_held(self) -> bool:
        """Whether the weights are loaded."""
        return bool(self._holds)

    def add(self, hook: AlignDevicesHook, module_name: str, slots: Iterable[OffloadedTensor]) -> None:
        """Add a hook's tensors to the block."""
        prefix = f"{module_name}." if module_name else ""
        self._members.append((hook, hook.weights_map or {}, prefix, list(slots)))
        hook.block = self

    def discard(self, hook: AlignDevicesHook) -> None:
        """Remove a hook that is detached from its module."""
        self._members = [member for member in self._members if member[0] is not hook]

    def names(self) -> list[str]:
        """Return the names of its tensors."""
        return [prefix + slot.name for _, _, prefix, slots in self._members for slot in slots]

    def acquire(self) -> None:
        """Hold the block in this thread; the first hold sets the tensors of its modules."""
        thread = threading.get_ident()
        # What is kept for later forwards, which may need gradients, is no inference tensor.
        with self._lock, torch.inference_mode(mode=False):
            count = self._holds.get(thread, 0)
            if not count:
                weights = self._order.weights
                values = weights.acquire(self.name)
                if not self._holds:
                    try:
                        self._enter(values)
                    except BaseException:
                        self._leave()
                        weights.release(self.name)
                        raise
            self._holds[thread] = count + 1
        if not count:
            self._order.prefetch_after(self.name)

    def release(self) -> None:
        """Undo one `acquire` of this thread."""
        thread = threading.get_ident()
        with self._lock:
            count = self._holds[thread] - 1
            if count:
                self._holds[thread] = count
                return
            del self._holds[thread]
            self._order.weights.release(self.name)
            if not self._holds:
                self._leave()

    def _enter(self, values: Mapping[str, torch.Tensor]) -> None:
        for hook, weights_map, prefix, slots in self._members:
            for slot in slots:
                if hook.weights_map is weights_map:
                    slot.enter(values[prefix + slot.name])
                else:  # the user replaced the module's weights, as merging an adapter does
                    slot.enter((hook.weights_map or {})[slot.name].to(self.device))

    def _leave(self) -> None:
        for _, _, _, slots in self._members:
            for slot in slots:
                slot.leave()


_blocks: weakref.WeakSet[OffloadedBlock] = weakref.WeakSet()


def _after_fork() -> None:
    for block in [*_blocks]:
        block.reset_in_child()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class BlockOrder:
    """The blocks of one model in the order of their last use, for prefetching.

    Initially a block is followed by the model's next one, and the last by the first, as in generation.
    """

    weights: MappedBlocks | StreamedBlocks

    def __init__(self) -> None:
        self._following: dict[str, str] = {}
        self._last: str | None = None

    def start(self, names: Sequence[str], weights: MappedBlocks | StreamedBlocks) -> None:
        """Set the blocks, in registration order, and the source of their weights."""
        self.weights = weights
        self._following = dict(zip(names, [*names[1:], *names[:1]], strict=True))

    def prefetch_after(self, block: str) -> None:
        """Record that a block is in use, and prefetch the block that probably follows."""
        if self._last is not None:
            self._following[self._last] = block
        self._last = block
        following = self._following[block]
        if following != block:
            self.weights.prefetch(following)


def make_blocks(
    model: nn.Module,
    entries: Sequence[str],
    weights: OffloadedWeightsLoader,
    device: torch.device,
    *,
    preload_classes: frozenset[str] = frozenset(),
    memory_limit: int | None = None,
    resident_block: str | None = None,
) -> None:
    """Group the hooks of offloaded modules into blocks, and stream the blocks.

    A block is the largest module below an entry that does not contain a list of modules, or a module of an
    unsplit class. Tensors of modules above blocks are materialised once and stay resident: they are few, and
    such a module may use them at any time. The tensors of `resident_block` also stay resident.
    """
    roots: dict[str, nn.Module] = {}
    for entry in entries:
        module = _module_at(model, entry)
        if module is not None:
            roots.update(_roots(module, entry, preload_classes))
    # For an entry that is a tensor, its module is a block if it contains no other block.
    for entry in entries:
        owner = entry.rpartition(".")[0]
        if _module_at(model, entry) is None and not any(_is_below(root, owner) for root in roots):
            roots[owner] = model.get_submodule(owner)
    if resident_block is not None:
        roots.pop(resident_block, None)
    order = BlockOrder()
    blocks: dict[str, OffloadedBlock] = {}
    resident = 0
    for name, module in model.named_modules(remove_duplicate=False):
        for hook in align_hooks_of(module):
            if not hook.offload or hook.block is not None or not hook.slots:
                continue
            root = entry_of(name, roots)
            if root is None:
                resident += _make_resident(hook, name, weights, device)
                continue
            if root not in blocks:
                blocks[root] = OffloadedBlock(root, order, device)
            blocks[root].add(hook, name, hook.slots)
    for name, block in blocks.items():
        _hook_root(roots[name], block)
    members = {name: block.names() for name, block in blocks.items()}
    streams = device_streams(device)
    limit = None if memory_limit is None else memory_limit - resident
    order.start(
        list(blocks),
        MappedBlocks(weights, members, device, limit)
        if streams is None
        else StreamedBlocks(weights, members, streams),
    )


def _roots(module: nn.Module, name: str, preload_classes: frozenset[str]) -> Iterator[tuple[str, nn.Module]]:
    split = isinstance(module, CONTAINERS) or (
        type(module).__name__ not in preload_classes
        and any(isinstance(part, CONTAINERS) and _has_tensors(part) for part in module.modules())
    )
    if not split:
        if _has_tensors(module):
            yield name, module
        return
    for leaf, child in child_table(module).items():
        if child is not None:
            yield from _roots(child, f"{name}.{leaf}" if name else leaf, preload_classes)


def _has_tensors(module: nn.Module) -> bool:
    return any(parameter_table(part) or buffer_table(part) for part in module.modules())


def _module_at(model: nn.Module, name: str) -> nn.Module | None:
    prefix, _, leaf = name.rpartition(".")
    return child_table(model.get_submodule(prefix)).get(leaf) if name else model


def _is_below(name: str, ancestor: str) -> bool:
    return name != ancestor and (not ancestor or name.startswith(f"{ancestor}."))


def _make_resident(
    hook: AlignDevicesHook, name: str, weights: OffloadedWeightsLoader, device: torch.device
) -> int:
    prefix = f"{name}." if name else ""
    taken = 0
    for slot in hook.slots:
        value = weights[prefix + slot.name].to(device)
        slot.enter(value, keep=True)
        taken += value.nbytes
    hook.keep_resident()
    return taken


def _hook_root(root: nn.Module, block: OffloadedBlock) -> None:
    """Make the root's forward acquire the block even if the root has no tensors."""
    if any(hook.block is block for hook in align_hooks_of(root)):
        return
    hook = next(iter(align_hooks_of(root)), None)
    if hook is None:
        hook = AlignDevicesHook(execution_device=block.device, only=())
        add_hook_to_module(root, hook, append=True)
    hook.block = block
