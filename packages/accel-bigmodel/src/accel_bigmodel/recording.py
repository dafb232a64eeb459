"""Read a part of a tensor that a conversion would make: only what this part needs of the tensors in files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from accel_state.errors import CheckpointMismatchError, some_of
from accel_state.torch_private import TorchDispatchMode, disable_current_modes, tree_map

if TYPE_CHECKING:
    from accel_ops.weights.hub_names import Conversion

_aten = torch.ops.aten
Reader = Callable[[Sequence[slice]], Tensor]
"""Returns the part of a tensor that has these indices: a slice of each dim, with a start and a stop."""


class Recording(TorchDispatchMode):
    """Records how tensors without values are made of others, so that parts of them can be read.

    What is concatenated, stacked, split or transposed is read where it is needed; any other operation reads
    its inputs in full. `is_complete`: whether all operations were recorded.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_complete = True
        self._readers: dict[int, tuple[Tensor, Reader]] = {}  # keeps tensors, so that none gets another's id

    def source(self, tensor: Tensor, reader: Reader) -> Tensor:
        """Note the reader of a tensor, and return the tensor."""
        self._readers[id(tensor)] = tensor, reader
        return tensor

    def read(self, tensor: Tensor, region: Sequence[slice]) -> Tensor:
        """Return a part of a recorded tensor, on the CPU."""
        if any(part.start >= part.stop for part in region):
            sizes = [max(part.stop - part.start, 0) for part in region]
            return torch.empty(sizes, dtype=tensor.dtype, device="cpu")
        return self._readers[id(tensor)][1](region)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func._schema.is_mutable or "device" in kwargs:
            self.is_complete = False
        results = result if isinstance(result, (list, tuple)) else [result]
        for index, made in enumerate(results):
            if isinstance(made, Tensor):
                self.source(made, partial(self._read_made, func, args, kwargs, index, made.dim()))
        return result

    def _read_made(
        self, func: Any, args: Any, kwargs: dict[str, Any], index: int, dims: int, region: Sequence[slice]
    ) -> Tensor:
        first, rest = args[0], args[1:]
        if func in (_aten.cat.default, _aten.stack.default):
            return self._read_joined(func, first, (rest or (0,))[0] % dims, region)
        if func in (_aten.split.Tensor, _aten.split_with_sizes.default):
            size, dim = rest[0], (*rest, 0)[1] % dims
            begin = size * index if isinstance(size, int) else sum(size[:index])
            part = slice(region[dim].start + begin, region[dim].stop + begin)
            return self.read(first, _with(region, dim, part))
        if func is _aten.transpose.int:
            one, other = (dim % dims for dim in rest)
            swapped = _with(_with(region, one, region[other]), other, region[one])
            return self.read(first, swapped).transpose(one, other)
        if func is _aten.clone.default:
            return self.read(first, region)
        values, options = tree_map(self._whole, (args, kwargs))
        result = func(*values, **options)
        return (result[index] if isinstance(result, (list, tuple)) else result)[tuple(region)]

    def _read_joined(self, func: Any, tensors: Sequence[Tensor], dim: int, region: Sequence[slice]) -> Tensor:
        wanted, parts, start = region[dim], list[Tensor](), 0
        is_stack = func is _aten.stack.default
        for tensor in tensors:
            length = 1 if is_stack else tensor.shape[dim]
            own = slice(max(wanted.start - start, 0), min(wanted.stop - start, length))
            if own.start < own.stop:
                inner = [*region[:dim], *region[dim + 1 :]] if is_stack else _with(region, dim, own)
                parts.append(self.read(tensor, inner))
            start += length
        return func(parts, dim)

    def _whole(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return self.read(value, [slice(0, size) for size in value.shape]).contiguous()


def record_conversion(
    conversion: Conversion, parts: Mapping[str, tuple[Sequence[int], torch.dtype, Reader]]
) -> tuple[Recording, dict[str, Tensor]]:
    """Run a conversion on tensors without values, of which the recording then reads parts of the results.

    Args:
        conversion: The conversion.
        parts: Shape, dtype and reader of each of its tensors in files, by name.

    Raises:
        CheckpointMismatchError: Tensors that belong together do not fit.
    """
    recording = Recording()

    def without_values(key: str) -> Tensor:
        shape, dtype, reader = parts[key]
        with disable_current_modes():
            empty = torch.empty(shape, dtype=dtype, device="meta")
        return recording.source(empty, reader)

    try:
        with recording:
            return recording, conversion.run(without_values)
    except Exception as error:
        raise CheckpointMismatchError(
            f"the checkpoint does not match the model. {some_of(conversion.parts)} cannot be "
            f"converted for {type(conversion.model).__name__}: {error}"
        ) from error


def _with(region: Sequence[slice], dim: int, part: slice) -> list[slice]:
    return [*region[:dim], part, *region[dim + 1 :]]
