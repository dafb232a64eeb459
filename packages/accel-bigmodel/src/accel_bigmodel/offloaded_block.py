"""Offloaded blocks of a model: acquired whole before a block's forward, released after it."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from accel_bigmodel.block_stream import StreamedBlocks
from accel_bigmodel.block_weights import MappedBlocks
from accel_bigmodel.hooks.align import AlignDevicesHook, align_hooks_of
from accel_bigmodel.hooks.base import add_hook_to_module
from accel_bigmodel.layers import CONTAINERS
from accel_ops.weights.read import entry_of
from accel_ops.weights.tensors import buffer_table, child_table, parameter_table
from accel_state.streams import device_streams

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    import torch
    from torch import nn

    from accel_bigmodel.hooks.slot import Slot
    from accel_bigmodel.offload import OffloadedWeightsLoader


class OffloadedBlock:
    """One block. Its hooks, of its root and of everything below it, hold it while their forward runs.

    Any number of threads may hold it; the last one to let go releases the weights.
    """

    def __init__(self, name: str, order: BlockOrder, device: torch.device) -> None:
        self.name = name
        self.device = device
        self._order = order
        self._lock = threading.RLock()
        self._holds: dict[int, int] = {}
        self._members: list[tuple[AlignDevicesHook, Mapping[str, Any], str, list[Slot]]] = []

    @property
    def is_held(self) -> bool:
        """Whether the weights are there."""
        return bool(self._holds)

    def add(self, hook: AlignDevicesHook, module_name: str, slots: Iterable[Slot]) -> None:
        """Let a hook's tensors come with the block."""
        prefix = f"{module_name}." if module_name else ""
        self._members.append((hook, hook.weights_map or {}, prefix, list(slots)))
        hook.block = self

    def discard(self, hook: AlignDevicesHook) -> None:
        """Let go of a hook that is detached from its module."""
        self._members = [member for member in self._members if member[0] is not hook]

    def names(self) -> list[str]:
        """Name its tensors."""
        return [prefix + slot.name for _, _, prefix, slots in self._members for slot in slots]

    def acquire(self) -> None:
        """Let this thread hold the block: the first hold makes the modules hold its tensors."""
        thread = threading.get_ident()
        with self._lock:
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
                else:  # somebody gave the module weights of its own, as merging an adapter does
                    slot.enter((hook.weights_map or {})[slot.name].to(self.device))

    def _leave(self) -> None:
        for _, _, _, slots in self._members:
            for slot in slots:
                slot.leave()


class BlockOrder:
    """The blocks of one model in the order of their use: after a block comes what came after it last time.

    At first that is the next one of the model; after the last block comes the first, as in generation.
    """

    weights: MappedBlocks | StreamedBlocks

    def __init__(self) -> None:
        self._following: dict[str, str] = {}
        self._last: str | None = None

    def start(self, names: Sequence[str], weights: MappedBlocks | StreamedBlocks) -> None:
        """Set the blocks, in order of registration, and what gives them their weights."""
        self.weights = weights
        self._following = dict(zip(names, [*names[1:], *names[:1]], strict=True))

    def prefetch_after(self, block: str) -> None:
        """Note that a block is in use, and prefetch the one that probably follows."""
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
    """Group the hooks of offloaded modules into blocks, and stream these.

    A block is the largest module below an entry that does not contain a list of modules, or one whose class
    stays whole. Tensors of modules above blocks are materialised once and stay resident: they are few, and
    such a module may use them at any time. So do those of the block that `resident_block` names.
    """
    roots: dict[str, nn.Module] = {}
    for entry in entries:
        module = _module_at(model, entry)
        if module is not None:
            roots.update(_roots(module, entry, preload_classes))
    # An entry that is a tensor: its module is a block if no other block lies below it.
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
        slot.enter(value)
        taken += value.nbytes
    hook.keep_resident()
    return taken


def _hook_root(root: nn.Module, block: OffloadedBlock) -> None:
    """Make sure that the block is acquired before its root's forward, also where the root has no tensors."""
    if any(hook.block is block for hook in align_hooks_of(root)):
        return
    hook = next(iter(align_hooks_of(root)), None)
    if hook is None:
        hook = AlignDevicesHook(execution_device=block.device, only=())
        add_hook_to_module(root, hook, append=True)
    hook.block = block
