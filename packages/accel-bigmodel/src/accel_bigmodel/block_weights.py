"""The weights of offloaded blocks, acquired and released block by block; here without copies, for the CPU.

What is acquired may be used by what the thread does next, and acquired again; it is released after its last
use was issued by this thread.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from accel_state.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from concurrent.futures import Future

    import torch
    from torch import Tensor

    from accel_bigmodel.offload import OffloadedWeightsLoader
    from accel_ops.weights.safetensors_file import SafetensorsFile


class MappedBlocks:
    """Weights of blocks that execute on the CPU (or on a device without streams).

    A weight in its own type is the mapped file itself; a thread reads the next block ahead. One that is cast
    is read and cast ahead, and dropped when its block is released.

    Args:
        limit: Bytes of offloaded weights that may be in memory; by default as many as the kernel keeps.

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
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="accel-read-ahead")
        self._lock = threading.RLock()
        self._holds: dict[str, int] = {}
        self._pending: dict[str, Future[dict[str, Tensor]]] = {}
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
            # Each is read before it is cast, one at a time.
            extra = sum(t.cast_nbytes for t in cast) + max((t.nbytes for t in cast), default=0)
            self._sizes[block] = (mapped, mapped + extra)
        largest = max(self._sizes, key=lambda block: self._sizes[block][1], default=None)
        if limit is not None and largest is not None and self._sizes[largest][1] > limit:
            raise SettingsError(
                f"the memory limit of {limit} bytes is less than block {largest!r} takes, which is "
                f"{self._sizes[largest][1]}: raise the limit, or split the block in the device_map"
            )

    def acquire(self, block: str) -> Mapping[str, Tensor]:
        """Return mapped tensors, and those that were cast."""
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
        """Keep what is mapped as long as the limit allows; cast tensors go with their last user."""
        with self._lock:
            self._holds[block] -= 1
            if not self._holds[block]:
                del self._holds[block]
                if block in self._resident:
                    self._resident[block] = self._sizes[block][0]

    def prefetch(self, block: str) -> None:
        """Read a block in a thread, if it fits beside those in use."""
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
        """Evict blocks that are not in use, those first that were used longest ago."""
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
        found: dict[int, tuple[SafetensorsFile, list[str]]] = {}
        for name in self._mapped[block]:
            located = self._weights.file_of(name)
            if located is not None:
                found.setdefault(id(located[0]), (located[0], []))[1].append(located[1])
        return list(found.values())
