"""Cut a state dict into files of bounded size, and say which tensor is in which."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from accel_ops.weights.names import shard_suffix
from accel_ops.weights.tensors import id_tensor_storage

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from torch import Tensor

Group = TypeVar("Group")
DEFAULT_SHARD_SIZE = "10GB"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardPlan:
    """Which tensors go to which file.

    Attributes:
        files: File name to the names of its tensors, in order.
        total_size: Bytes of all tensors, shared memory counted once.
    """

    files: dict[str, tuple[str, ...]]
    total_size: int

    @property
    def weight_map(self) -> dict[str, str]:
        """Tensor name to file name."""
        return {name: file for file, names in self.files.items() for name in names}

    @property
    def index(self) -> dict[str, Any] | None:
        """What the index file holds; `None` when one file has everything."""
        if len(self.files) < 2:
            return None
        return {"metadata": {"total_size": self.total_size}, "weight_map": self.weight_map}


def groups_of(state_dict: Mapping[str, Tensor]) -> Iterator[tuple[dict[str, Tensor], int]]:
    """Tell which tensors share memory, so that they have to be in the same file.

    Example:
        >>> import torch
        >>> weight = torch.zeros(4)
        >>> [(list(group), size) for group, size in groups_of({"a": weight, "b": weight})]
        [(['a', 'b'], 16)]
    """
    groups: dict[object, dict[str, Tensor]] = defaultdict(dict)
    for name, tensor in state_dict.items():
        groups[_memory(name, tensor)][name] = tensor
    return ((group, _group_bytes([*group.values()])) for group in groups.values())


def filled(groups: Iterable[tuple[Group, int]], limit: int) -> Iterator[tuple[list[Group], int]]:
    """Fill shards in order, each as far as it goes; there is one at least.

    Args:
        groups: What has to stay together, with its bytes. The next one is asked for before a shard that it
            does not fit into is given.
        limit: Bytes of a shard; a larger group has one of its own.

    Example:
        >>> list(filled([("a", 3), ("b", 3), ("c", 9)], 6))
        [(['a', 'b'], 6), (['c'], 9)]
    """
    shard: list[Group] = []
    size = 0
    for group, nbytes in groups:
        if shard and size + nbytes > limit:
            yield shard, size
            shard, size = [], 0
        shard.append(group)
        size += nbytes
    yield shard, size


def numbered(shards: Sequence[Sequence[str]], *, total_size: int, pattern: str) -> ShardPlan:
    """Name the files of shards, once it is known how many there are."""
    count = len(shards)
    return ShardPlan(
        files={pattern.format(suffix=shard_suffix(i, count)): tuple(names) for i, names in enumerate(shards)},
        total_size=total_size,
    )


def _memory(name: str, tensor: Tensor) -> object:
    return name if tensor.is_meta or not tensor.numel() else id_tensor_storage(tensor)


def _group_bytes(tensors: list[Tensor]) -> int:
    """Bytes of tensors that share one storage: never more than the storage has."""
    unique = {(t.storage_offset(), tuple(t.shape), t.stride(), t.dtype): t for t in tensors}
    summed = sum(math.prod(t.shape) * t.dtype.itemsize for t in unique.values())
    return summed if len(unique) == 1 else min(summed, tensors[0].untyped_storage().nbytes())
