"""Cut a state dict into files of bounded size, and say which tensor is in which."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from accel_ops.weights.names import SAFE_WEIGHTS_PATTERN_NAME, shard_suffix
from accel_ops.weights.sizes import convert_file_size_to_int
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


def split_state_dict(
    state_dict: Mapping[str, Tensor],
    *,
    max_shard_size: int | str = DEFAULT_SHARD_SIZE,
    pattern: str = SAFE_WEIGHTS_PATTERN_NAME,
) -> ShardPlan:
    """Plan shards in the order of the state dict, each filled as far as it goes.

    Tensors that share memory go to the same shard and count once. A tensor larger than the bound has a shard
    of its own.

    Args:
        state_dict: Name to tensor, on any device, the meta device too.
        max_shard_size: Bytes per file, or text like `"5GB"`.
        pattern: The file name, with `{suffix}`.

    Example:
        >>> import torch
        >>> tensors = {"a": torch.zeros(4), "b": torch.zeros(4), "c": torch.zeros(4)}
        >>> split_state_dict(tensors, max_shard_size=32).files
        {'model-00001-of-00002.safetensors': ('a', 'b'), 'model-00002-of-00002.safetensors': ('c',)}
    """
    limit = convert_file_size_to_int(max_shard_size)
    shards = [*filled(groups_of(state_dict), limit)]
    return numbered(
        [[name for names in groups for name in names] for groups, _ in shards],
        total_size=sum(size for _, size in shards),
        pattern=pattern,
    )


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
