"""Move parameters, gradients and states of optimizers to host memory and back; every tensor stays the same.

The storages of the tensors are emptied, and filled again later. Whatever holds tensors over them keeps them:
the groups of an optimizer, the buckets of DDP, the shards of FSDP2.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor, UntypedStorage

from accel_state.memory import clear_device_cache
from accel_state.streams import device_streams, pinned_if_possible, synchronize
from accel_state.torch_private import TorchDispatchMode, is_traceable_wrapper_subclass

StateKind: TypeAlias = Literal["parameters", "gradients", "optimizer"]
"""States of a run: of models (parameters and buffers), of backward passes, of optimizers."""
STATE_KINDS: tuple[StateKind, ...] = get_args(StateKind)

HostCopy: TypeAlias = "tuple[UntypedStorage, int, Tensor | None]"
"""An emptied storage, its size in bytes, and a copy of its values; `None` if nobody needs them."""


def move_to_host(tensors: Iterable[Tensor], scratch: Iterable[Tensor] = ()) -> list[HostCopy]:
    """Copy tensors that are on a device to pinned host memory, and free their memory on the device.

    Args:
        tensors: Their values are kept. What is on the host or in no storage of its own, such as a sparse
            tensor, stays where it is.
        scratch: Tensors whose values are not needed.
    """
    copies: dict[int, HostCopy] = {}
    for storage in _storages_on_device(tensors):
        if storage._cdata in copies:
            continue
        streams = device_streams(storage.device)
        host = None if streams is None else pinned_if_possible(streams, storage.nbytes())
        if streams is None or host is None:
            host = _bytes_of(storage).cpu()
        else:
            streams.copy_(host, _bytes_of(storage))
        copies[storage._cdata] = storage, storage.nbytes(), host
    for storage in _storages_on_device(scratch):
        copies.setdefault(storage._cdata, (storage, storage.nbytes(), None))
    for device in {storage.device for storage, _, _ in copies.values()}:
        synchronize(device)  # until the copies are complete, and other streams have read what is freed
    for storage, _, _ in copies.values():
        storage.resize_(0)
    clear_device_cache()
    return [*copies.values()]


def move_back(copies: Iterable[HostCopy]) -> None:
    """Allocate the memory of emptied storages, and fill it on the current stream, without waiting."""
    for storage, size, host in copies:
        storage.resize_(size)
        streams = device_streams(storage.device)
        if host is not None and streams is not None and host.is_pinned():
            streams.copy_(_bytes_of(storage), host)
        elif host is not None:
            _bytes_of(storage).copy_(host)


def _bytes_of(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _storages_on_device(tensors: Iterable[Any]) -> Iterator[UntypedStorage]:
    for tensor in tensors:
        if is_traceable_wrapper_subclass(tensor):
            # A `DTensor` has one ordinary tensor inside, a quantized one several.
            yield from _storages_on_device(getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
        elif not isinstance(tensor, Tensor):
            continue  # the mesh of a `DTensor`
        elif tensor.layout is torch.strided and tensor.device.type not in {"cpu", "meta"}:
            storage = tensor.untyped_storage()
            if storage.nbytes():
                yield storage


class _ReturnsItsArgument(TorchDispatchMode):
    """Within it, an operator returns its first argument."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0]


def buckets_of(reducer: Any) -> list[Tensor]:
    """Return the buckets in which DDP reduces gradients; its only function for them copies them as zeros."""
    with _ReturnsItsArgument():
        return [bucket.buffer() for bucket in reducer._get_zeros_like_grad_buckets()]
