"""Collectives of devices that record operations: those of their tensors are recorded, too."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from accel_state.backends.torch_dist import TorchCollectives
from accel_state.hang_monitor import collective_scope

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from accel_state.backends.base import ReduceOp

_NUMBERS = frozenset(
    {torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16}
    | {torch.int8, torch.uint8}
)
# What every device has collectives for; all other types are sent as the second.
_SENT_AS = {dtype: dtype for dtype in _NUMBERS} | {torch.bool: torch.uint8}
_ADDED_AS = {dtype: dtype for dtype in _NUMBERS} | {torch.bool: torch.int32}


class RecordedCollectives:
    """The collectives of a device that records operations; see `Collectives` for their contracts.

    Those of the device's tensors become a part of the recorded program, and wait for nothing. Tensors of the
    CPU and objects go over the process group of the host, as do types that the device does not have.

    Args:
        device: The device of this process.
        own: The module of its family, `DeviceKind.own_runtime`.
    """

    def __init__(self, device: torch.device, own: Any) -> None:
        self._host = host = TorchCollectives(torch.device("cpu"))
        self._device = device
        self._own = own
        self.rank: int = host.rank
        self.world_size: int = host.world_size
        self.chunk_bytes: int = host.chunk_bytes
        self.exchange_chunks = host.exchange_chunks
        self.start_scatter = host.start_scatter
        self.all_gather_object = host.all_gather_object
        self.broadcast_object_list = host.broadcast_object_list
        self.barrier = host.barrier  # what ranks have recorded waits only once something needs it

    def all_gather_into(
        self, out: Tensor, tensor: Tensor, meanwhile: Callable[[], None] | None = None
    ) -> None:
        """Fill `out` with the tensors of all ranks, in rank order."""
        if not self._is_recorded(tensor):
            self._host.all_gather_into(out, tensor, meanwhile)
            return
        if meanwhile is not None:
            meanwhile()
        with collective_scope("all_gather"):
            gathered = self._own.all_gather(tensor.reshape(-1).to(_SENT_AS[tensor.dtype]))
            out.copy_(gathered.reshape(out.shape))

    def broadcast(self, tensor: Tensor, src: int) -> None:
        """Overwrite `tensor` with that of rank `src`."""
        if not self._is_recorded(tensor):
            self._host.broadcast(tensor, src)
            return
        with collective_scope("broadcast"):
            sent = self._own.broadcast(tensor.to(_SENT_AS[tensor.dtype]), is_source=self.rank == src)
            tensor.copy_(sent)

    def all_reduce(
        self, tensor: Tensor, meanwhile: Callable[[], None] | None = None, *, op: ReduceOp = "sum"
    ) -> None:
        """Overwrite `tensor` with the values of all ranks combined."""
        if not self._is_recorded(tensor):
            self._host.all_reduce(tensor, meanwhile, op=op)
            return
        if meanwhile is not None:
            meanwhile()
        with collective_scope("all_reduce"):
            tensor.copy_(self._own.all_reduce(tensor.to(_ADDED_AS[tensor.dtype]), op))

    def _is_recorded(self, tensor: Tensor) -> bool:
        return tensor.device.type == self._device.type and tensor.dtype in _SENT_AS and tensor.numel() > 0
