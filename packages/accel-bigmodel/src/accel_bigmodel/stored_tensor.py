"""Where the bytes of an offloaded tensor are: shape, dtypes and offset, without reading any."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from accel_ops.weights.safetensors_file import fill_from

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class FileIdentity:
    """A file as it was when it was opened: the path may later name another one."""

    path: Path
    device: int
    inode: int


def file_identity(path: str | os.PathLike[str]) -> FileIdentity:
    """Note which file a path names now."""
    found = Path(path).stat()
    return FileIdentity(Path(path), found.st_dev, found.st_ino)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """An offloaded tensor where it is stored.

    Attributes:
        dtype: The type that it is used in.
        memory: The tensor itself: in memory, or mapped.
        file: The file that is mapped, if its bytes can be read there.
        begin: Where they begin in the file.
    """

    shape: tuple[int, ...]
    stored: torch.dtype
    dtype: torch.dtype
    memory: Tensor
    file: FileIdentity | None = None
    begin: int = 0

    @property
    def is_cast(self) -> bool:
        """Whether it is used in another type than it is stored in."""
        return self.stored != self.dtype

    @property
    def nbytes(self) -> int:
        """Its bytes as they are stored."""
        return math.prod(self.shape) * self.stored.itemsize

    @property
    def cast_nbytes(self) -> int:
        """Its bytes in the type that it is used in."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def key(self) -> tuple[object, ...]:
        """What tied weights have in common: the same bytes, used as the same type."""
        memory, file = self.memory, self.file
        if not memory.numel():
            return (id(memory),)
        if file is not None:
            return (file.device, file.inode, self.begin, self.shape, self.stored, self.dtype)
        where = (memory.device, memory.data_ptr())
        return (*where, self.shape, memory.stride(), self.stored, self.dtype)

    def load(self) -> Tensor:
        """Read it into memory of its own, in the type that it is used in."""
        tensor = torch.empty(self.shape, dtype=self.stored)
        if self.nbytes:
            self.read_into(tensor.view(-1).view(torch.uint8), 0)
        return tensor.to(self.dtype)

    def read_into(self, target: Tensor, begin: int) -> None:
        """Fill a flat uint8 tensor on the CPU with the bytes from `begin` on.

        With large plain reads if the file still has its name; from memory or the mapping otherwise, since a
        file that was replaced is whole there.
        """
        if self.file is None or not _read(self.file, target, self.begin + begin):
            flat = self.memory.detach().contiguous().view(-1).view(torch.uint8)
            target.copy_(flat[begin : begin + target.numel()])


def _read(identity: FileIdentity, target: Tensor, begin: int) -> bool:
    try:
        file = identity.path.open("rb", buffering=0)
    except FileNotFoundError:
        return False
    with file:
        found = os.fstat(file.fileno())
        if (found.st_dev, found.st_ino) != (identity.device, identity.inode):
            return False
        fill_from(file, target, begin, identity.path)
    return True
