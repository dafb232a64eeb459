"""Release the pages of mapped files after copying their tensors.

The pages of a mapping count as memory of the process once they were read. Code that copies mapped tensors
releases each tensor after its copy, so that a load needs little more than the memory that it fills.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Generator, Iterable
from contextlib import contextmanager

from torch import Tensor

from accel_state.platforms import libc

_mapped: dict[int, int] = {}  # address to bytes of the storages that `releasable` keeps alive
_DONT_NEED = 4  # MADV_DONTNEED in sys/mman.h


@contextmanager
def releasable(tensors: Iterable[Tensor]) -> Generator[None]:
    """Allow `release` to free the pages of tensors within the block.

    Args:
        tensors: Tensors that are privately mapped from files, and not written to within the block: writes
            would be lost.
    """
    retained = [*tensors]
    spans = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in retained
        if tensor.numel()
    }
    _mapped.update(spans)
    try:
        yield
    finally:
        for address in spans:
            _mapped.pop(address, None)


def release(value: object) -> None:
    """Free the pages of a tensor after it was copied; they are read again when they are used.

    Does nothing for other objects and for tensors that are not in `releasable`.
    """
    library = libc()
    if type(value) is not Tensor or value.device.type != "cpu" or library is None or not _mapped:
        return
    address = value.untyped_storage().data_ptr()
    nbytes = _mapped.get(address, 0)
    # Its first and last page may contain other tensors.
    begin = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (address + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - begin
    if length > 0:
        library.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(length), _DONT_NEED)
