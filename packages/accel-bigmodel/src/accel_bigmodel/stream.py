"""Offloaded blocks in the order of their use: the next one comes while the present one computes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Protocol

from accel_state.errors import SettingsError

if TYPE_CHECKING:
    from concurrent.futures import Future

    from torch import Tensor

    from accel_bigmodel.offload import OffloadedWeightsLoader
    from accel_ops.weights.safetensors_file import SafetensorsFile


class Carrier(Protocol):
    """Brings blocks to where they are used. Called from one thread, in the order `begin`, `ahead`, `end`."""

    def begin(self, block: str) -> None:
        """Make a block's tensors usable by what the caller does next."""
        ...

    def ahead(self, block: str) -> None:
        """Start to bring a block that is probably next; return at once."""
        ...

    def end(self, block: str) -> None:
        """A block's last use has been issued; its place may be used again."""
        ...

    def tensor(self, name: str) -> Tensor:
        """Give a tensor of the block that was begun last."""
        ...


class StreamedWeights(Mapping[str, "Tensor"]):
    """The offloaded weights of a model as its hooks ask for them.

    The first tensor asked of a block begins it, ends the one before, and starts the one that followed it last
    time (at first: the next one of the model). After the last block comes the first, as in generation.

    Args:
        weights: All weights by name, for whoever asks outside of blocks.
        blocks: Block name to the names of its tensors, in order of registration.
        carrier: Brings blocks.
    """

    def __init__(
        self, weights: Mapping[str, Tensor], blocks: Mapping[str, Iterable[str]], carrier: Carrier
    ) -> None:
        self.weights = weights
        self.carrier = carrier
        self._block_of = {name: block for block, names in blocks.items() for name in names}
        order = list(blocks)
        self._following = dict(zip(order, [*order[1:], *order[:1]], strict=True))
        self._present: str | None = None

    def __getitem__(self, name: str) -> Tensor:
        block = self._block_of.get(name)
        if block is None:
            return self.weights[name]
        if block != self._present:
            self._enter(block)
        return self.carrier.tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.weights)

    def __len__(self) -> int:
        return len(self.weights)

    def _enter(self, block: str) -> None:
        before = self._present
        if before is not None:
            self._following[before] = block
            self.carrier.end(before)
        self._present = block
        self.carrier.begin(block)
        following = self._following[block]
        if following != block:
            self.carrier.ahead(following)


class MappedCarrier:
    """Blocks that execute on the CPU: their weights are the mapped file itself, nothing is copied.

    Args:
        weights: Where the tensors are.
        blocks: Block name to the names of its tensors.
        limit: Bytes of offloaded weights that may be in memory; by default as many as the kernel keeps.

    Raises:
        SettingsError: Two neighbouring blocks do not fit in the limit.
    """

    def __init__(
        self, weights: OffloadedWeightsLoader, blocks: Mapping[str, Iterable[str]], limit: int | None = None
    ) -> None:
        self._weights = weights
        self._blocks = {block: list(names) for block, names in blocks.items()}
        self._limit = limit
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="accel-read-ahead")
        self._coming: dict[str, Future[None]] = {}
        self._resident: dict[str, int] = {}
        self._sizes = {} if limit is None else {name: self._size(name) for name in self._blocks}
        largest = max(self._sizes, key=self._sizes.__getitem__, default=None)
        if limit is not None and largest is not None and self._sizes[largest] > limit:
            raise SettingsError(
                f"the memory limit of {limit} bytes is less than block {largest!r}, which has "
                f"{self._sizes[largest]}: raise the limit, or split the block in the device_map"
            )

    def begin(self, block: str) -> None:
        """Wait until the block was read, if a thread is at it."""
        coming = self._coming.pop(block, None)
        if coming is not None:
            coming.result()
        self._keep(block)

    def ahead(self, block: str) -> None:
        """Read a block in a thread, if it fits beside the present one."""
        if block in self._coming:
            return
        if self._limit is not None:
            if block in self._resident or self._present_size() + self._sizes[block] > self._limit:
                return
            self._keep(block, protect=next(reversed(self._resident), None))
        self._coming[block] = self._reader.submit(self._read, block)

    def end(self, block: str) -> None:
        """Keep it as long as the limit allows."""

    def tensor(self, name: str) -> Tensor:
        """Give the mapped tensor."""
        return self._weights[name]

    def _read(self, block: str) -> None:
        for file, names in self._files(block):
            file.read_ahead(names)

    def _keep(self, block: str, protect: str | None = None) -> None:
        """Make room for a block by forgetting those that were used longest ago."""
        if self._limit is None:
            return
        self._resident.pop(block, None)
        room = self._limit - self._sizes[block]
        for old in list(self._resident):
            if sum(self._resident.values()) <= room:
                break
            if old != protect:
                self._forget(old)
        self._resident[block] = self._sizes[block]

    def _present_size(self) -> int:
        return self._resident[next(reversed(self._resident))] if self._resident else 0

    def _forget(self, block: str) -> None:
        coming = self._coming.pop(block, None)
        if coming is not None:
            coming.result()
        del self._resident[block]
        for file, names in self._files(block):
            file.forget(names)

    def _files(self, block: str) -> list[tuple[SafetensorsFile, list[str]]]:
        found: dict[int, tuple[SafetensorsFile, list[str]]] = {}
        for name in self._blocks[block]:
            place = self._weights.file_of(name)
            if place is not None:
                found.setdefault(id(place[0]), (place[0], []))[1].append(place[1])
        return list(found.values())

    def _size(self, block: str) -> int:
        return sum(file.entries[name].nbytes for file, names in self._files(block) for name in names)
