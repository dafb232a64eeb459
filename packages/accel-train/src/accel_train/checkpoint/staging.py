"""Copy state trees to host memory that is used again; write and read objects as `torch.save` does."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, UntypedStorage

from accel_ops.weights.safetensors_io import clean_state_dict_for_safetensors, write_safetensors
from accel_state.device_kinds import WITHOUT_STORAGE
from accel_state.errors import CheckpointError
from accel_state.libraries import is_torch_version
from accel_state.remote import AnyPath
from accel_state.streams import DeviceStreams, device_streams, pinned_if_possible
from accel_state.unpickling import load_safely
from accel_train.checkpoint.stores import on_disk

if TYPE_CHECKING:
    from _typeshed import SupportsWrite

_BLOCK = 64 << 20  # bytes of host memory that are allocated at once, unless a storage is larger
_ALIGNMENT = 64


class HostStaging:
    """Copy state trees to host buffers that the next save uses again.

    Call `reset`, then `copy` for every tree, then `synchronize`; only then read the copies. They are valid
    until the next `reset`. Storages are copied in full: a copy is serialised to the same bytes as its
    original, and views share memory where the originals do.
    """

    def __init__(self) -> None:
        self._pools: dict[torch.device, _Pool] = {}
        self._streams: dict[torch.device, DeviceStreams | None] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of host memory in the buffers."""
        return sum(block.memory.numel() for pool in self._pools.values() for block in pool.blocks)

    def reset(self) -> None:
        """Let the next copies use the same memory."""
        self._streams.clear()
        for pool in self._pools.values():
            for block in pool.blocks:
                block.used = 0

    def copy(self, tree: Any) -> Any:
        """Start to copy a tree; call `synchronize` before reading the copy."""
        return copied_tree(tree, self._copy_of)

    def synchronize(self) -> None:
        """Wait for all copies, and release the buffers that none of them uses."""
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
        else:  # a copy to pageable memory blocks
            target.copy_(source)
        begin = target.storage_offset()
        # The result has exactly these bytes, since `torch.save` writes the full storage behind a tensor.
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
        """Return uint8 memory of shape `(nbytes,)`, aligned for every type, and whether it is pinned."""
        needed = -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        free = (block for block in self.blocks if block.memory.numel() - block.used >= needed)
        block = next(free, None)
        if block is None:
            # torch allocates pinned memory in powers of two: other storages use the remainder of a block.
            size = max(_BLOCK, 1 << (needed - 1).bit_length())
            pinned = None if self._streams is None else pinned_if_possible(self._streams, size)
            memory = torch.empty(size, dtype=torch.uint8, device="cpu") if pinned is None else pinned
            block = _Block(memory, pinned is not None)
            self.blocks.append(block)
        begin = block.used
        block.used += needed
        return block.memory[begin : begin + nbytes], block.is_pinned

    def trim(self) -> None:
        """Release the blocks that no copy uses."""
        self.blocks = [block for block in self.blocks if block.used]


def copied_tree(tree: Any, copy_storage: Callable[[UntypedStorage], UntypedStorage]) -> Any:
    """Copy a tree as `copy.deepcopy` does, but the storages of its tensors with a function.

    Args:
        tree: Nested containers of tensors and other objects. An object that the tree contains several times
            is copied once.
        copy_storage: Called once for every storage that has memory; returns a CPU storage of the same size.
    """
    memo: dict[int, Any] = {}
    storages: dict[int, Any] = {}
    tensors = {id(tensor): tensor for tensor in _tensors_in(tree, set()) if _is_plain(tensor)}
    memo |= {key: _copied(tensor, copy_storage, storages) for key, tensor in tensors.items()}
    for key, tensor in tensors.items():
        vars(memo[key]).update(copy.deepcopy(vars(tensor), memo))  # `torch.save` writes attributes, too
    return copy.deepcopy(tree, memo)


def _is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor is only a view of a storage; `copy.deepcopy` copies other tensors."""
    is_dense = tensor.layout == torch.strided and not (tensor.is_meta or tensor.is_quantized)
    return is_dense and type(tensor) in {Tensor, torch.nn.Parameter} and not tensor.is_neg()


def _copied(
    tensor: Tensor,
    copy_storage: Callable[[UntypedStorage], UntypedStorage],
    storages: dict[int, Any],
) -> Tensor:
    source = tensor.untyped_storage()
    key = source._cdata
    if tensor.device.type in WITHOUT_STORAGE:
        # Equal views of one tensor share memory again.
        known = storages.setdefault(key, {})
        view = (tensor.storage_offset(), tuple(tensor.size()), tensor.stride(), tensor.dtype)
        if view not in known:
            known[view] = tensor.detach().cpu()
        return _like(tensor, known[view].view_as(known[view]))
    target = storages.get(key)
    if target is None:
        target = copy_storage(source) if source.nbytes() else torch.UntypedStorage(0)
        storages[key] = target
    result = torch.empty(0, dtype=tensor.dtype, device="cpu").set_(
        target, tensor.storage_offset(), tensor.size(), tensor.stride()
    )
    return _like(tensor, result.conj() if tensor.is_conj() else result)


def _like(tensor: Tensor, result: Tensor) -> Tensor:
    """Return the copy of a tensor as a parameter if the tensor is one."""
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(result, tensor.requires_grad)
    return result.requires_grad_(tensor.requires_grad)


def _tensors_in(tree: Any, seen: set[int]) -> Iterator[Tensor]:
    """Yield the tensors in the dictionaries, lists and tuples of a tree, not those inside other objects."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (dict, list, tuple)) and id(tree) not in seen:  # pyright: ignore[reportUnknownArgumentType]
        seen.add(id(tree))  # pyright: ignore[reportUnknownArgumentType]
        values: Any = tree.values() if isinstance(tree, dict) else tree
        for value in values:
            yield from _tensors_in(value, seen)


def write_weights(state: Mapping[str, Any], sink: SupportsWrite[Any], *, safe: bool) -> None:
    """Write the state dict of a model."""
    if safe:
        write_safetensors(clean_state_dict_for_safetensors(state), sink)
    else:
        write_object(dict(state), sink)


_IS_PER_THREAD = is_torch_version(">=", "2.15")


def write_object(obj: Any, sink: Any) -> None:
    """Write an object as `torch.save` does, with all tensors on the CPU."""
    # The manifest has better checksums than `torch.save`. Before torch 2.15 the option may belong to all
    # threads, the user's among them, and is left unchanged.
    with _crc_off() if _IS_PER_THREAD else nullcontext():
        torch.save(on_host(obj), sink)


def on_host(tree: Any) -> Any:
    """Copy the tensors of a tree that are not on the CPU; return the tree itself if there are none."""
    if all(tensor.device.type in {"cpu", "meta"} for tensor in _tensors_in(tree, set())):
        return tree
    return copied_tree(tree, lambda storage: storage if storage.device.type == "cpu" else storage.cpu())


@contextmanager
def _crc_off() -> Generator[None]:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


def location_of(value: Any, device: torch.device) -> torch.device:
    """Return the device that a `map_location` means."""
    try:
        return device if value == "on_device" else torch.device("cpu" if value is None else value)
    except (RuntimeError, TypeError) as error:
        raise TypeError(
            f"load_state(map_location={value!r}): pass None, 'cpu', 'on_device' or a device."
        ) from error


def read_object(path: AnyPath, **kwargs: Any) -> Any:
    """Read a file of `torch.save`: tensors, arrays of numbers and plain containers.

    Args:
        path: The file.
        **kwargs: As for `torch.load`. `weights_only=False` reads any object, and runs whatever its author put
            into the file.

    Raises:
        CheckpointError: The file holds other objects, or is damaged.
    """
    try:
        with on_disk(path) as local:
            return load_safely(str(local), **kwargs)
    except pickle.UnpicklingError as error:
        reason = str(error).strip().splitlines()
        raise CheckpointError(
            f"{str(path)!r} contains objects that can only be read by running code from the file. If "
            "you trust its author, pass"
            " load_kwargs={'weights_only': False}, or name the classes with "
            f"torch.serialization.add_safe_globals. ({next((x for x in reason if 'GLOBAL' in x), reason[0])})"
        ) from error
    except (EOFError, RuntimeError) as error:
        raise CheckpointError(f"{str(path)!r} is damaged: {str(error).splitlines()[0]}") from error
