"""Names of weight files, sizes in bytes, and the plan of shards: `dtype_byte_size`, `fill_shards`.

Importing it does not import torch.
"""

from __future__ import annotations

import math
import re
import reprlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import isfinite
from numbers import Real
from typing import TYPE_CHECKING, Any, TypeVar

from accel_ops.weights.tensors import id_tensor_storage, is_dense
from accel_state.errors import SettingsError
from accel_state.frozen import frozen
from accel_state.labels import CustomDtype

if TYPE_CHECKING:
    import torch
    from torch import Tensor

MODEL_NAME = "pytorch_model"
"""The stem of a model's `.bin` files."""
SAFE_MODEL_NAME = "model"
"""The stem of a model's safetensors files."""
WEIGHTS_NAME = f"{MODEL_NAME}.bin"
"""A full model in one `.bin` file."""
WEIGHTS_PATTERN_NAME = "pytorch_model{suffix}.bin"
"""A shard of a model in `.bin` files; the suffix is like `-00001-of-00005`."""
WEIGHTS_INDEX_NAME = f"{WEIGHTS_NAME}.index.json"
"""The index of `.bin` shards: tensor name to file."""
SAFE_WEIGHTS_NAME = f"{SAFE_MODEL_NAME}.safetensors"
"""A full model in one safetensors file."""
SAFE_WEIGHTS_PATTERN_NAME = "model{suffix}.safetensors"
"""A shard of a model in safetensors files; the suffix is like `-00001-of-00005`."""
SAFE_WEIGHTS_INDEX_NAME = f"{SAFE_WEIGHTS_NAME}.index.json"
"""The index of safetensors shards: tensor name to file."""

SAFETENSORS_SUFFIX = ".safetensors"
INDEX_SUFFIX = ".index.json"
OFFLOAD_INDEX_NAME = "index.json"


_UNITS = {
    "": 1, "B": 1,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
}  # fmt: skip
_DECIMAL = ("KB", "MB", "GB", "TB")
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?b?)\s*", re.IGNORECASE)
_CUSTOM_BYTES = {CustomDtype.FP8: 1.0, CustomDtype.INT4: 0.5, CustomDtype.INT2: 0.25}


def dtype_byte_size(dtype: torch.dtype | CustomDtype) -> float:
    """Return the bytes per element of a dtype.

    Args:
        dtype: A torch dtype, or one of the sub-byte dtypes of `CustomDtype`. A `torch.bool` counts as one
            bit, as documented; in memory it takes a byte.

    Example:
        >>> import torch
        >>> dtype_byte_size(torch.bfloat16), dtype_byte_size(CustomDtype.INT4)
        (2, 0.5)
    """
    if isinstance(dtype, CustomDtype):
        return _CUSTOM_BYTES[dtype]
    return 0.125 if str(dtype) == "torch.bool" else dtype.itemsize


def convert_file_size_to_int(size: float | str) -> int:
    """Convert a human-readable size to bytes.

    Args:
        size: Bytes, rounded down; or a number with a unit: decimal (`"5GB"`, `"200MB"`) or
            binary (`"5GiB"`). A small b after a decimal unit means bits (`"5Gb"`).

    Raises:
        SettingsError: The text is not a size, or the number not finite.

    Example:
        >>> convert_file_size_to_int("1GB"), convert_file_size_to_int("1.5GiB")
        (1000000000, 1610612736)
    """
    if isinstance(size, Real):
        if not isfinite(size):
            raise SettingsError(f"{size!r} is not a size: write a number of bytes")
        return int(size)
    match = _SIZE.fullmatch(size) if isinstance(size, str) else None
    unit = match[2].upper() if match else ""
    if not match or unit not in _UNITS:
        raise SettingsError(
            f"{reprlib.repr(size)} is not a size: write a number with a unit, as in '5GB' or '512MiB'"
        )
    count = int(float(match[1]) * _UNITS[unit])
    return count // 8 if match[2].endswith("b") and unit in _DECIMAL else count


def convert_bytes(size: float) -> str:
    """Format bytes with a human-readable unit, in powers of 1024.

    Example:
        >>> convert_bytes(1536 * 1024)
        '1.5 MB'
    """
    number = size
    for unit in ("bytes", "KB", "MB", "GB", "TB"):
        if number < 1024:
            return f"{round(number, 2)} {unit}"
        number /= 1024
    return f"{round(number, 2)} PB"


Group = TypeVar("Group")
DEFAULT_SHARD_SIZE = "10GB"


@frozen
class WeightShards:
    """The assignment of the tensors of a state dict to files.

    Attributes:
        files: File name to the names of its tensors, in order.
        total_size: Bytes of all tensors; shared memory counts once.
    """

    files: dict[str, tuple[str, ...]]
    total_size: int

    @property
    def weight_map(self) -> dict[str, str]:
        """Tensor name to file name."""
        return {name: file for file, names in self.files.items() for name in names}

    @property
    def index(self) -> dict[str, Any] | None:
        """The content of the index file; `None` if there is only one file."""
        if len(self.files) < 2:
            return None
        return {"metadata": {"total_size": self.total_size}, "weight_map": self.weight_map}


def groups_of(state_dict: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], int]]:
    """Group tensors that share memory, which must be in the same file; yield each group with its bytes.

    Sparse tensors and values that are not tensors have separate groups, and count as zero bytes.
    """
    groups: dict[object, dict[str, Any]] = defaultdict(dict)
    for name, value in state_dict.items():
        is_shareable = is_dense(value) and not value.is_meta and value.numel()
        groups[id_tensor_storage(value) if is_shareable else name][name] = value
    return ((group, _group_bytes([*filter(is_dense, group.values())])) for group in groups.values())


def fill_shards(groups: Iterable[tuple[Group, int]], limit: int) -> Iterator[tuple[list[Group], int]]:
    """Fill shards in order up to a size limit; there is at least one shard.

    Args:
        groups: Tensors that must share a file, with their bytes. A shard is yielded once it is full.
        limit: Bytes of a shard; a larger group gets its own.

    Example:
        >>> list(fill_shards([("a", 3), ("b", 3), ("c", 9)], 6))
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


def numbered(shards: Sequence[Sequence[str]], *, total_size: int, pattern: str) -> WeightShards:
    """Return the shards with file names, which contain the number of shards."""
    count = len(shards)
    suffixes = [f"-{number:05d}-of-{count:05d}" for number in range(1, count + 1)] if count > 1 else [""]
    files = {
        pattern.format(suffix=suffix): tuple(names) for suffix, names in zip(suffixes, shards, strict=True)
    }
    return WeightShards(files=files, total_size=total_size)


def _group_bytes(tensors: list[Tensor]) -> int:
    """Return the bytes of tensors that share one storage: at most the size of the storage."""
    unique = {(t.storage_offset(), tuple(t.shape), t.stride(), t.dtype): t for t in tensors}
    summed = sum(math.prod(t.shape) * t.dtype.itemsize for t in unique.values())
    return summed if len(unique) < 2 else min(summed, tensors[0].untyped_storage().nbytes())
