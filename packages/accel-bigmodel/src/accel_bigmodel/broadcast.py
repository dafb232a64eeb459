"""A checkpoint that rank 0 reads and the other ranks receive."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed

from accel_bigmodel.sources import Source, open_checkpoint
from accel_state import runtime
from accel_state.errors import SettingsError

if TYPE_CHECKING:
    import os

    from torch import Tensor


def broadcast_sources(checkpoint: str | os.PathLike[str]) -> list[Source]:
    """Open a checkpoint on rank 0, and make the same table on every rank.

    Every rank then asks for the same tensors in the same order; each is sent once.

    Raises:
        SettingsError: There is no process group.
        CheckpointError: Rank 0 could not open it; every rank raises.
    """
    if not (distributed.is_available() and distributed.is_initialized()):
        raise SettingsError(
            "broadcast_from_rank0=True needs a process group: start with `accel launch` or torchrun"
        )
    opened: list[Source] = []
    lines: list[Any] = [None]
    if distributed.get_rank() == 0:
        try:
            opened = open_checkpoint(checkpoint)
            lines = [[(str(source.path), source.tensors) for source in opened]]
        except (OSError, ValueError) as error:
            lines = [error]
    distributed.broadcast_object_list(lines, src=0)
    if isinstance(lines[0], Exception):
        raise lines[0]
    reading = opened or [None] * len(lines[0])
    return [
        BroadcastSource(Path(path), tensors, source)
        for (path, tensors), source in zip(lines[0], reading, strict=True)
    ]


class BroadcastSource(Source):
    """One file, known everywhere, read on rank 0. Asking for a tensor is a collective."""

    broadcast = True

    def __init__(
        self,
        path: Path,
        tensors: dict[str, tuple[tuple[int, ...], torch.dtype]],
        source: Source | None,
    ) -> None:
        self.path = path
        self.tensors = tensors
        self._source = source

    def get(self, name: str) -> Tensor:
        """Send or receive one tensor; it ends where the collectives need it."""
        device = _collective_device()
        shape, dtype = self.tensors[name]
        if self._source is not None:
            tensor = self._source.get(name).to(device).contiguous()
        else:
            tensor = torch.empty(shape, dtype=dtype, device=device)
        # As bytes: not every backend knows every element type.
        distributed.broadcast(tensor.view(-1).view(torch.uint8), src=0)
        return tensor


def _collective_device() -> torch.device:
    if distributed.get_backend() in ("gloo", "mpi"):
        return torch.device("cpu")
    return runtime.current_or_single().device
