"""Acquire, prefetch and release blocks of offloaded weights.

The tensors of a block are in one flat buffer, which belongs to the copy stream and is freed when the block is
released, or later if autograd or an output holds a slice of it. The copy of the next block waits until the
block before the current one has been computed: two blocks are on the device. If the device has memory for
only one block, the copy waits until the current block has run.

A thread may use a block after acquiring it, and may acquire it again; it releases the block after it has
issued the last use.
"""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from accel_bigmodel.hooks import AlignDevicesHook, OffloadedTensor, align_hooks_of
from accel_bigmodel.host_to_device import HostToDevice, available_host_memory
from accel_bigmodel.offload import OffloadedWeightsLoader, StoredTensor
from accel_bigmodel.sizes import CONTAINERS
from accel_ops.weights.safetensors_io import SafetensorsFile
from accel_ops.weights.tensors import named_module_tensors
from accel_state.streams import DeviceStreams, device_streams, pinned_if_possible

_ALIGNMENT = 512
"""Bytes; the alignment of CUDA's allocations."""

_PINNED_SHARE = 0.5
"""The fraction of the available host memory that blocks may keep pinned."""

_SMALL = 1 << 20
"""Bytes that a thread reads in less time than it takes to start it."""


@dataclass(slots=True, eq=False)
class _Unit:
    """Tensors that are copied together: those of one block only, or a tensor shared by several blocks.

    Attributes:
        tensors: Names, storage and offset in the buffer of each tensor.
        nbytes: Bytes of the buffer.
        pinned: A copy of the buffer in pinned memory, if it is kept there.
        users: Number of acquisitions.
        transfer: The pending or finished copy, with its event on a device with streams.
        values: The tensors on the device, while it is acquired.
        memory: The buffer on the device.
        is_shared: Whether it is a tensor of several blocks, which stays on the device until a forward ends.
    """

    tensors: list[tuple[list[str], StoredTensor, int]] = field(
        default_factory=list[tuple[list[str], "StoredTensor", int]]
    )
    nbytes: int = 0
    pinned: Tensor | None = None
    users: int = 0
    transfer: Future[tuple[list[Any], torch.Event | None]] | None = None
    values: dict[str, Tensor] | None = None
    memory: Tensor | None = None
    is_shared: bool = False

    def views(self, buffer: Tensor) -> dict[str, Tensor]:
        """Return the tensors of a buffer as views."""
        values: dict[str, Tensor] = {}
        for names, stored, begin in self.tensors:
            flat = buffer[begin : begin + stored.nbytes]
            value = flat.view(stored.dtype).view(stored.memory.shape)
            values.update(dict.fromkeys(names, value))
        return values


class StreamedBlocks:
    """Streams blocks of offloaded weights to a device; the next block is copied while one is in use.

    Weights that several blocks share are copied once in a forward of the model, if memory suffices. On the
    CPU, and on a device without streams, a weight that is not cast is a view of the mapped file, which a
    prefetch of a large block reads; one that is cast is read and cast, of a large block by the prefetch.
    """

    def __init__(
        self, weights: OffloadedWeightsLoader, blocks: Mapping[str, Sequence[str]], device: torch.device
    ) -> None:
        self._weights = weights
        self._device = device
        self.streams = device_streams(device)
        self._blocks = blocks
        self._following: dict[str | None, str | None] = dict(
            zip([None, *self._blocks], self._blocks, strict=False)
        )
        self._units = self._make_units()
        self._all = list(dict.fromkeys(chain.from_iterable(self._units.values())))
        self._released: list[torch.Event] = []
        self._pipeline: HostToDevice | None = None
        if self.streams is not None:
            self._pipeline = HostToDevice(self.streams)
            self._pin(self.streams)
        self._start_thread()

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy or pickle the weights; the copy has its own threads, and is not in use."""
        return StreamedBlocks, (self._weights, self._blocks, self._device)

    def check_process(self) -> None:
        """Start again in a forked child, which inherits no thread, and maybe held locks."""
        if self._process != os.getpid():
            self._start_thread()

    def _start_thread(self) -> None:
        self._process = os.getpid()
        self.lock = threading.RLock()
        self.holds: defaultdict[str, dict[int, int]] = defaultdict(dict)
        self._thread = threading.local()
        self._prefetched: list[_Unit] = []
        self._kept: list[_Unit] = []
        self._worker = ThreadPoolExecutor(
            max_workers=1,
            thread_name_prefix="accel-prefetch",
            initializer=None if self.streams is None else self.streams.set_current,
        )
        for unit in self._all:
            unit.users, unit.transfer, unit.values, unit.memory = 0, None, None, None

    def acquire(self, block: str) -> Mapping[str, Tensor]:
        """Return the tensors of a block; the current stream waits, on the device, until they are copied."""
        with self.lock:
            units, before = self._units[block], self._prefetched
            self._prefetched = []
            for unit in units:
                unit.users += 1
            for unit in before:
                self._drop(unit)
            try:
                for unit in units if self.streams is not None else ():
                    self._start(unit)
                values: dict[str, Tensor] = {}
                for unit in units:
                    values.update(self._receive(unit))
            except BaseException:
                for unit in units:
                    unit.users -= 1
                    self._drop(unit)
                raise
            for unit in units if vars(self._thread).get("is_in_pass") else ():
                if unit.is_shared and unit not in self._kept:
                    self._kept.append(unit)
            return values

    def release(self, block: str) -> None:
        """Allow the memory to be reused after the work submitted to this thread's current stream so far."""
        with self.lock:
            for unit in self._units[block]:
                unit.users -= 1
            if self.streams is not None:
                current = self.streams.current_stream()
                for unit in self._units[block]:
                    if unit.memory is not None:
                        self.streams.record_stream(unit.memory, current)
                done = self.streams.new_event()
                done.record(current)
                self._released.append(done)
            for unit in self._units[block]:
                self._drop(unit)

    def prefetch(self, block: str | None) -> None:
        """Start to copy a block in a worker thread, in place of the one that was prefetched before."""
        with self.lock:
            before, self._prefetched = self._prefetched, [] if block is None else list(self._units[block])
            for unit in before:
                self._drop(unit)
            for unit in self._prefetched:
                if self.streams is not None or unit.nbytes > _SMALL:
                    self._start(unit)

    def begin_pass(self) -> None:
        """Prefetch the first block: this thread's forward of the model begins."""
        self.check_process()
        self._thread.used, self._thread.is_in_pass = [], True
        self.prefetch(self._following.get(None))

    def end_pass(self) -> None:
        """Keep no block on the device: nothing says that this thread's next forward comes soon."""
        self._thread.used, self._thread.is_in_pass = [], False
        with self.lock:
            self._drop_kept()
            is_copied = bool(self._prefetched)
            self.prefetch(None)
        if is_copied:  # after an error: wait until the copy has ended, and its memory is free
            self._worker.submit(int).result()

    def prefetch_after(self, block: str) -> None:
        """Prefetch the block that followed `block` last time; initially, the next one of the model."""
        used: list[str] = vars(self._thread).setdefault("used", [])
        if block in used:  # another forward of a part of the model
            self._following[used[-1]] = None
            used.clear()
        else:
            self._following[used[-1] if used else None] = block
        used.append(block)
        following = self._following.get(block)
        if following is not None:
            self.prefetch(following)

    def _start(self, unit: _Unit) -> Future[tuple[list[Any], torch.Event | None]]:
        if unit.transfer is None:
            after, self._released = self._released, []
            unit.transfer = self._worker.submit(self._transfer, unit, after)
        return unit.transfer

    def _transfer(self, unit: _Unit, after: Sequence[torch.Event]) -> tuple[list[Any], torch.Event | None]:
        """Wait, in the worker thread, until the memory of earlier blocks is free, and copy the unit.

        The copy is in a list, from which it is taken: the thread that made it keeps its result for a while.
        """
        streams, pipeline = self.streams, self._pipeline
        if streams is None or pipeline is None:
            return [self._load(unit)], None
        for event in after:
            event.synchronize()
        with streams.on(pipeline.stream):
            buffer = streams.empty(unit.nbytes)
        if unit.pinned is not None:
            pipeline.copy_pinned(unit.pinned, buffer)
        else:
            pipeline.copy(
                [
                    (stored, buffer[begin : begin + stored.nbytes].view(stored.dtype))
                    for _, stored, begin in unit.tensors
                    if stored.nbytes
                ]
            )
        ready = streams.new_event()
        ready.record(pipeline.stream)
        return [buffer], ready

    def _load(self, unit: _Unit) -> dict[str, Tensor]:
        """Read mapped tensors into the page cache, and cast those that are used in another dtype."""
        files: dict[SafetensorsFile, list[str]] = {}
        values: dict[str, Tensor] = {}
        for names, stored, _ in unit.tensors:
            if stored.file is not None and not stored.is_cast and unit.nbytes > _SMALL:
                files.setdefault(stored.file, []).append(stored.name)
            value = stored.load() if stored.is_cast else stored.memory
            values.update(dict.fromkeys(names, value.to(self._device)))
        for file, names in files.items():
            file.read_ahead(names)
        return values

    def _receive(self, unit: _Unit) -> dict[str, Tensor]:
        if self.streams is None:
            values = unit.values
            if values is None:
                values = self._load(unit) if unit.transfer is None else unit.transfer.result()[0].pop()
            unit.values = values
            return values
        try:
            copied, ready = self._start(unit).result()
        except torch.OutOfMemoryError:
            # It was prefetched while a block was acquired that is released now: copy it after that block.
            self._drop_kept()
            unit.transfer = None
            copied, ready = self._start(unit).result()
        if ready is not None:
            self.streams.current_stream().wait_event(ready)
        if unit.values is None:
            unit.memory = buffer = copied.pop()
            unit.values = unit.views(buffer)
        return unit.values

    def _drop(self, unit: _Unit) -> None:
        if not unit.users and unit not in self._prefetched and unit not in self._kept:
            unit.transfer = unit.values = unit.memory = None

    def _drop_kept(self) -> None:
        kept, self._kept = self._kept, []
        for unit in kept:
            self._drop(unit)

    def _make_units(self) -> dict[str, list[_Unit]]:
        """Put the tensors of each block in a unit, and each tensor of several blocks in one of its own."""
        tensors: dict[tuple[object, ...], StoredTensor] = {}
        users: dict[tuple[object, ...], dict[str, str]] = {}  # names of each tensor, with their blocks
        for block, members in self._blocks.items():
            for name in members:
                stored = self._weights.stored(name)
                tensors.setdefault(stored.key, stored)
                users.setdefault(stored.key, {})[name] = block
        units: defaultdict[str, list[_Unit]] = defaultdict(list)
        own: dict[str, _Unit] = {}
        for key, names in users.items():
            blocks = list(dict.fromkeys(names.values()))
            unit = own.get(blocks[0]) if len(blocks) == 1 else None
            if unit is None:
                unit = _Unit(is_shared=len(blocks) > 1)
                for block in blocks:
                    units[block].append(unit)
                if not unit.is_shared:
                    own[blocks[0]] = unit
            unit.tensors.append(([*names], tensors[key], unit.nbytes))
            unit.nbytes += max(1, -(-tensors[key].nbytes // _ALIGNMENT)) * _ALIGNMENT
        return units

    def _pin(self, streams: DeviceStreams) -> None:
        """Move blocks that are in host memory to pinned memory, within the budget."""
        budget = int(available_host_memory() * _PINNED_SHARE)
        self._weights.state_dict = state = dict(self._weights.state_dict)
        for unit in self._all:
            size = 1 << max(0, unit.nbytes - 1).bit_length()  # torch pins powers of two
            names = {name for held, _, _ in unit.tensors for name in held}
            if size > budget or not names <= state.keys():
                continue
            unit.pinned = pinned_if_possible(streams, unit.nbytes)
            if unit.pinned is None:
                break
            budget -= size
            views = unit.views(unit.pinned)
            state.update(views)
            for index, (names, stored, begin) in enumerate(unit.tensors):
                view = views[names[0]]
                view.copy_(stored.memory)
                # The unpinned tensors are freed with their last reference.
                unit.tensors[index] = (names, replace(stored, memory=view), begin)


class OffloadedBlock:
    """One offloaded block. The hooks of its root and submodules hold it while their forward runs.

    Any number of threads may hold it; the last one releases the weights.
    """

    weights: StreamedBlocks

    def __init__(self, name: str, device: torch.device) -> None:
        self.name = name
        self.device = device
        # Hooks with their weights, the prefix of their tensors' names in the model, and the tensors.
        self.members: list[tuple[AlignDevicesHook, Mapping[str, Any] | None, str, list[OffloadedTensor]]] = []

    @property
    def is_held(self) -> bool:
        """Whether the weights are loaded."""
        return bool(self.weights.holds[self.name])

    def discard(self, hook: AlignDevicesHook) -> None:
        """Remove a hook that is detached from its module."""
        self.members = [member for member in self.members if member[0] is not hook]

    def acquire(self) -> None:
        """Hold the block in this thread; the first hold sets the tensors of its modules."""
        self.weights.check_process()
        thread, holds = threading.get_ident(), self.weights.holds[self.name]
        # What is kept for later forwards, which may need gradients, is no inference tensor.
        with self.weights.lock, torch.inference_mode(mode=False):
            count = holds.get(thread, 0)
            if not count:
                values = self.weights.acquire(self.name)
                if not holds:
                    try:
                        self._enter(values)
                    except BaseException:
                        self._leave()
                        self.weights.release(self.name)
                        raise
            holds[thread] = count + 1
        if not count:
            self.weights.prefetch_after(self.name)

    def release(self) -> None:
        """Undo one `acquire` of this thread."""
        thread, holds = threading.get_ident(), self.weights.holds[self.name]
        with self.weights.lock:
            count = holds.pop(thread, 0)
            if count > 1:
                holds[thread] = count - 1
            elif count:  # a forked child has lost its holds
                self.weights.release(self.name)
            if not holds:
                self._leave()

    def _enter(self, values: Mapping[str, torch.Tensor]) -> None:
        for hook, weights_map, prefix, slots in self.members:
            for slot in slots:
                if hook.weights_map is weights_map:
                    slot.enter(values[prefix + slot.name])
                else:  # the user replaced the module's weights, as merging an adapter does
                    slot.enter((hook.weights_map or {})[slot.name].to(self.device))

    def _leave(self) -> None:
        for _, _, _, slots in self.members:
            for slot in slots:
                slot.leave()


def block_roots(
    model: nn.Module,
    entries: Sequence[str],
    preload_classes: Container[str] = (),
    resident_block: str | None = None,
) -> dict[str, list[str]]:
    """Split offloaded entries of a device map into blocks: the name of each one's root to its entries.

    A block is the largest module below an entry that does not contain a list of modules, or a module of an
    unsplit class; for entries that are tensors, it is their module. Tensors of modules above blocks are in no
    block: they are few, and such a module may use them at any time. `resident_block` is no block.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    blocks: dict[str, list[str]] = {}
    for entry in entries:
        for name in _roots(modules[entry], entry, preload_classes) if entry in modules else ():
            if name != resident_block:
                blocks[name] = [name]
    for entry in entries:
        owner = entry.rpartition(".")[0]
        prefix = f"{owner}." if owner else ""
        if entry not in modules and not any(root != owner and root.startswith(prefix) for root in blocks):
            blocks.setdefault(owner, []).append(entry)
    return blocks


def make_blocks(
    model: nn.Module, roots: Iterable[str], weights: OffloadedWeightsLoader, device: torch.device
) -> None:
    """Group the hooks of offloaded modules into blocks, and stream the blocks."""
    blocks: dict[str, OffloadedBlock] = {}
    names: dict[str, list[str]] = {}
    for root in roots:
        block, tensors = OffloadedBlock(root, device), list[str]()
        module = model.get_submodule(root)
        for name, part in module.named_modules(prefix=root, remove_duplicate=False):
            for hook in align_hooks_of(part):
                if hook.slots and hook.block is None:
                    prefix = f"{name}." if name else ""
                    hook.block = block
                    block.members.append((hook, hook.weights_map, prefix, hook.slots))
                    for slot in hook.slots:
                        tensor = prefix + slot.name
                        slot.is_view = device.type == "cpu" and not weights.stored(tensor).is_cast
                        tensors.append(tensor)
        if block.members:
            names[root] = tensors
            blocks[root] = align_hooks_of(module)[-1].block = block  # also if it has no tensors of its own
    streamed = StreamedBlocks(weights, names, device)
    for block in blocks.values():
        block.weights = streamed
    align_hooks_of(model)[0].streamed = streamed


def _roots(module: nn.Module, name: str, preload_classes: Container[str]) -> Iterator[str]:
    split = isinstance(module, CONTAINERS) or (
        type(module).__name__ not in preload_classes
        and any(isinstance(part, CONTAINERS) and _has_tensors(part) for part in module.modules())
    )
    if not split:
        if _has_tensors(module):
            yield name
        return
    for leaf, child in module._modules.items():
        if child is not None:
            yield from _roots(child, f"{name}.{leaf}" if name else leaf, preload_classes)


def _has_tensors(module: nn.Module) -> bool:
    return next(named_module_tensors(module, recurse=True), None) is not None
