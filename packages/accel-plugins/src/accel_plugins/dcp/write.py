"""Write one rank's shards of a state: a file of tensors, and a metadata file with their offsets.

Ranks exchange no plans: which rank writes a tensor follows from its placements, and one rank merges the
metadata files into the folder's index (`accel_plugins.dcp.index`). The format is that of
`torch.distributed.checkpoint.FileSystemWriter`.
"""

from __future__ import annotations

import io
import math
import pickle
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo  # pyright: ignore[reportPrivateUsage] - what the format's index consists of
from torch.distributed.checkpoint.storage import WriteResult

from accel_plugins.dcp.layout import shard_file
from accel_plugins.dcp.planners import TorchPlanners

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from accel_ops.weights.stream import ByteSink
    from accel_plugins.dcp.protocol import RankPlanners


class ShardWriter:
    """Write one rank's shards of a state: nested dictionaries and lists, with the same names on all ranks.

    PyTorch's planners, for plain tensors and DTensors, plan what it writes unless others are given.
    """

    def __init__(self, state: Mapping[str, Any], rank: int, planners: RankPlanners | None = None) -> None:
        self._planner, self._plan = (planners or TorchPlanners()).plan_save(state, rank)
        self._file = shard_file(rank)
        self._results: list[WriteResult] = []

    @property
    def nbytes(self) -> int:
        """Number of bytes of the tensors that this rank writes, without headers."""
        return sum(
            math.prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize
            for item in self._plan.items
            if item.tensor_data is not None
        )

    def local_values(self) -> list[Tensor | bytes]:
        """Return the values that this rank writes: tensors on their devices, objects as bytes."""
        values = (self._planner.resolve_data(item) for item in self._plan.items)
        return [one.getvalue() if isinstance(one, io.BytesIO) else one.detach() for one in values]

    def write_shards(self, values: Sequence[Tensor | bytes], sink: ByteSink) -> None:
        """Write this rank's file of shards: the result of `local_values`, or a copy of it."""
        counted: Any = _Counted(sink)
        self._results = []
        for item, value in zip(self._plan.items, values, strict=True):
            begin = counted.size
            if isinstance(value, bytes):
                counted.write(value)
            else:
                torch.save(compact(value.cpu()), counted)
            length = counted.size - begin
            stored = _StorageInfo(self._file, begin, length)
            self._results.append(WriteResult(index=item.index, size_in_bytes=length, storage_data=stored))

    def write_local_metadata(self, values: object, sink: ByteSink) -> None:
        """Write this rank's metadata file; call it after `write_shards`."""
        del values
        sink.write(pickle.dumps((self._plan, self._results)))


class _Counted:
    """Sink that counts the bytes written to it."""

    def __init__(self, sink: ByteSink) -> None:
        self._sink = sink
        self.size = 0

    def write(self, data: Any) -> int:
        count = memoryview(data).nbytes
        self._sink.write(data)
        self.size += count
        return count

    def flush(self) -> None:
        """Do nothing; `torch.save` calls it."""


def compact(tensor: Tensor) -> Tensor:
    """Copy a view to its own storage, since `torch.save` writes a view's whole storage."""
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()
