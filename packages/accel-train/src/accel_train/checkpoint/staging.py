"""Copies of a state in host memory that they own, so that training goes on while the state is written."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from accel_state.devices.kinds import WITHOUT_STORAGE
from accel_state.streams import device_streams, pinned_if_possible

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import UntypedStorage

    from accel_state.streams import DeviceStreams

_BLOCK = 64 << 20  # bytes of host memory that are allocated at once; more for a larger storage
_ALIGNMENT = 64


class HostStaging:
    """Host copies of state trees in buffers that the next save uses again.

    Call `reset`, then `copy` for every tree, then `synchronize`; only then read the copies. They are valid
    until the next `reset`. Storages are copied as they are, so that a copy is serialised to the same bytes as
    its original: views share memory where the originals do.
    """

    def __init__(self) -> None:
        self._pools: dict[torch.device, _Pool] = {}
        self._streams: dict[torch.device, DeviceStreams | None] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of host memory that are kept."""
        return sum(block.memory.numel() for pool in self._pools.values() for block in pool.blocks)

    def reset(self) -> None:
        """Let the next copies use the same memory."""
        self._streams.clear()
        for pool in self._pools.values():
            for block in pool.blocks:
                block.used = 0

    def copy(self, tree: Any) -> Any:
        """Copy a tree. Copies from a device are under way: synchronise before reading them."""
        return copied_tree(tree, self._copy_of)

    def synchronize(self) -> None:
        """Wait until all copies have arrived, and release the buffers that none of them uses."""
        for streams in self._streams.values():
            if streams is not None:
                streams.synchronize()
        for pool in self._pools.values():
            pool.trim()

    def _copy_of(self, storage: UntypedStorage) -> UntypedStorage:
        device = storage.device
        if device not in self._streams:
            self._streams[device] = device_streams(device)
        streams = self._streams[device]
        pool = self._pools.setdefault(device, _Pool(streams))
        target, is_pinned = pool.take(storage.nbytes())
        source = torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
        if streams is not None and is_pinned:
            streams.copy_(target, source)
        else:  # pageable memory is filled when this returns
            target.copy_(source)
        begin = target.storage_offset()
        # A storage of exactly these bytes: `torch.save` writes the whole storage behind a tensor.
        return target.untyped_storage()[begin : begin + storage.nbytes()]


@dataclass(slots=True)
class _Block:
    """Host memory, of which the first `used` bytes are taken."""

    memory: Tensor
    is_pinned: bool
    used: int = 0


class _Pool:
    """Blocks of host memory for the storages of one device."""

    def __init__(self, streams: DeviceStreams | None) -> None:
        self.blocks: list[_Block] = []
        self._streams = streams

    def take(self, nbytes: int) -> tuple[Tensor, bool]:
        """Take uint8 memory of shape `(nbytes,)`, aligned for every type; say whether it is pinned."""
        needed = -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        free = (block for block in self.blocks if block.memory.numel() - block.used >= needed)
        block = next(free, None)
        if block is None:
            # torch's pinned memory comes in powers of two: what is left of a block serves other storages.
            size = max(_BLOCK, 1 << (needed - 1).bit_length())
            pinned = None if self._streams is None else pinned_if_possible(self._streams, size)
            memory = torch.empty(size, dtype=torch.uint8) if pinned is None else pinned
            block = _Block(memory, pinned is not None)
            self.blocks.append(block)
        begin = block.used
        block.used += needed
        return block.memory[begin : begin + nbytes], block.is_pinned

    def trim(self) -> None:
        """Release the blocks of which nothing is used."""
        self.blocks = [block for block in self.blocks if block.used]


def on_host(tree: Any) -> Any:
    """Return a tree with all tensors on the CPU; those that are there, and a tree of only such, stay."""
    if all(tensor.device.type in {"cpu", "meta"} for tensor in _tensors_in(tree, set())):
        return tree
    return copied_tree(tree, lambda storage: storage if storage.device.type == "cpu" else storage.cpu())


def copied_tree(tree: Any, copy_storage: Callable[[UntypedStorage], UntypedStorage]) -> Any:
    """Copy a tree as `copy.deepcopy` does, but the storages of its tensors with a function.

    Args:
        tree: Nested containers of tensors and other objects. What is one object in several places of the tree
            is one in the copy, too.
        copy_storage: Called once for every storage that has memory; returns one on the CPU of the same size.
    """
    memo: dict[int, Any] = {}
    storages: dict[int, Any] = {}
    tensors = {id(tensor): tensor for tensor in _tensors_in(tree, set()) if _is_plain(tensor)}
    memo |= {key: _copied(tensor, copy_storage, storages) for key, tensor in tensors.items()}
    for key, tensor in tensors.items():
        vars(memo[key]).update(copy.deepcopy(vars(tensor), memo))  # they are saved, too
    return copy.deepcopy(tree, memo)


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is a view of a storage and nothing else; `copy.deepcopy` copies the others."""
    usual = tensor.layout == torch.strided and not (tensor.is_meta or tensor.is_quantized)
    return usual and type(tensor) in {Tensor, torch.nn.Parameter} and not tensor.is_neg()


def _copied(
    tensor: Tensor,
    copy_storage: Callable[[UntypedStorage], UntypedStorage],
    storages: dict[int, Any],
) -> Tensor:
    source = tensor.untyped_storage()
    key = source._cdata  # pyright: ignore[reportPrivateUsage] - by which `torch.save` tells storages apart
    if tensor.device.type in WITHOUT_STORAGE:
        return _read_back(tensor, storages.setdefault(key, {}))
    target = storages.get(key)
    if target is None:
        target = copy_storage(source) if source.nbytes() else torch.UntypedStorage(0)
        storages[key] = target
    result = torch.empty(0, dtype=tensor.dtype).set_(
        target, tensor.storage_offset(), tensor.size(), tensor.stride()
    )
    return _like(tensor, result.conj() if tensor.is_conj() else result)


def _read_back(tensor: Tensor, known: dict[Any, Tensor]) -> Tensor:
    """Copy a tensor of a device without storages; views of one shape of one tensor share memory again."""
    view = (tensor.storage_offset(), tuple(tensor.size()), tensor.stride(), tensor.dtype)
    if view not in known:
        known[view] = tensor.detach().cpu()
    return _like(tensor, known[view].view_as(known[view]))


def _like(tensor: Tensor, result: Tensor) -> Tensor:
    """Return the copy of a tensor as a parameter if the tensor is one."""
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(result, tensor.requires_grad)
    return result.requires_grad_(tensor.requires_grad)


def _tensors_in(tree: Any, seen: set[int]) -> Iterator[Tensor]:
    """All tensors in the dictionaries, lists and tuples of a tree, without those inside of other objects."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (dict, list, tuple)) and id(tree) not in seen:  # pyright: ignore[reportUnknownArgumentType]
        seen.add(id(tree))  # pyright: ignore[reportUnknownArgumentType]
        values: Any = tree.values() if isinstance(tree, dict) else tree
        for value in values:
            yield from _tensors_in(value, seen)
