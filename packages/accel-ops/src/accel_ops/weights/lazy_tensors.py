"""Tensors of files that are read in chunks: `LazyTensor`, `lazy_safetensors`, `lazy_torch_file`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from accel_ops.tree import recursively_apply
from accel_ops.weights.safetensors_io import SafetensorsFile, as_bytes, fill_from, make_header
from accel_state.errors import CheckpointError, first_line
from accel_state.frozen import frozen
from accel_state.remote import AnyPath
from accel_state.torch_private import FakeTensorMode, create_file_view

if TYPE_CHECKING:
    from _typeshed import SupportsWrite


@frozen
class LazyTensor:
    """A tensor whose rows are read on request.

    Attributes:
        shape: Its shape.
        dtype: Its dtype.
        read: Returns a contiguous copy of rows `begin` to `end` of its first dim. A 0-d tensor has one row,
            of shape `(1,)`.
        identity: Equal for two names of one tensor; `None` if it is unknown.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[int, int], Tensor]
    identity: object = None

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def chunks(self, limit: int) -> Iterator[tuple[int, Tensor]]:
        """Read it in chunks from the first row to the last.

        Args:
            limit: Bytes of a chunk; a larger row is a separate chunk.

        Yields:
            The index of the first row of a chunk, and the rows.
        """
        if not math.prod(self.shape):
            return
        rows = self.shape[0] if self.shape else 1
        step = max(1, limit // (self.nbytes // rows))
        for begin in range(0, rows, step):
            yield begin, self.read(begin, min(begin + step, rows))

    def full(self) -> Tensor:
        """Read the full tensor."""
        if not math.prod(self.shape):
            return torch.empty(self.shape, dtype=self.dtype, device="cpu")
        return self.read(0, self.shape[0] if self.shape else 1).view(self.shape)


def lazy_safetensors(path: AnyPath) -> dict[str, LazyTensor]:
    """Return the tensors of a safetensors file as lazy tensors, in the order of its header.

    Raises:
        CheckpointError: The file is not a safetensors file.
    """
    file = SafetensorsFile(path)
    return {
        name: stored_tensor(file.read_into, entry.begin, entry.shape, entry.dtype)
        for name, entry in file.entries.items()
    }


def write_lazy_safetensors(
    tensors: Mapping[str, LazyTensor],
    sink: SupportsWrite[Any],
    chunks_of: Callable[[str, LazyTensor], Iterator[tuple[int, Tensor]]],
) -> None:
    """Write a safetensors file in chunks of tensors.

    Args:
        tensors: Name to tensor.
        sink: Receives the bytes.
        chunks_of: Reads a tensor in chunks, as `LazyTensor.chunks` does.

    Raises:
        CheckpointError: The format does not support a dtype.
    """
    header, spans = make_header({name: (lazy.shape, lazy.dtype) for name, lazy in tensors.items()})
    sink.write(header)
    for name in spans:
        for _, rows in chunks_of(name, tensors[name]):
            sink.write(as_bytes(rows))


def stored_tensor(
    read_into: Callable[[Tensor, int], None],
    begin: int,
    shape: Sequence[int],
    dtype: torch.dtype,
    stride: Sequence[int] | None = None,
    identity: object = None,
) -> LazyTensor:
    """Return a lazy tensor whose elements are in a file.

    Args:
        read_into: Fills a flat uint8 tensor with the bytes of the file from an offset on.
        begin: The offset of its first element.
        shape: Its shape.
        dtype: Its element type.
        stride: Its strides in elements; contiguous by default. A chunk of a tensor that was saved transposed
            spans nearly all elements, which are then read for every chunk.
        identity: The `identity` of the result.
    """
    shape, full_shape = tuple(shape), tuple(shape) or (1,)
    dense = torch.empty(full_shape, device="meta").stride()
    steps = dense if stride is None or not stride else tuple(stride)
    is_dense = all(
        step == wanted or size < 2 for step, wanted, size in zip(steps, dense, full_shape, strict=True)
    )

    def read(first: int, last: int) -> Tensor:
        rows = (last - first, *full_shape[1:])
        span = (
            math.prod(rows)
            if is_dense
            else 1 + sum((n - 1) * step for n, step in zip(rows, steps, strict=True))
        )
        flat = torch.empty(span, dtype=dtype, device="cpu")
        read_into(flat.view(torch.uint8), begin + first * steps[0] * dtype.itemsize)
        return flat.view(rows) if is_dense else flat.as_strided(rows, steps).contiguous()

    return LazyTensor(shape=shape, dtype=dtype, read=read, identity=identity)


def lazy_torch_file(
    path: AnyPath,
    *,
    part: tuple[int, int] | None = None,
    load: Callable[[Any], Any] | None = None,
) -> Any:
    """Read a file of `torch.save` with lazy tensors in place of its tensors.

    Args:
        path: The file.
        part: Offset and length of the data that `torch.save` wrote, if the file has more.
        load: Reads an open file as `torch.load` does, without executing code from it; by default it accepts
            tensors and plain containers.

    Raises:
        CheckpointError: The file is damaged, or holds more than tensors and plain containers.
    """
    load = load or _load
    try:
        with path.open("rb") as opened:
            file: Any = opened if part is None else create_file_view(opened, *part)
            if file.read(2) != b"PK":
                raise ValueError("it was saved by a version of PyTorch before 1.6")
            file.seek(0)
            with FakeTensorMode():
                tree = load(file)
    except (OSError, CheckpointError):
        raise
    except Exception as error:
        raise CheckpointError(
            f"{str(path)!r} cannot be read: it is damaged, or holds more than tensors and plain containers, "
            f"which only code of the file could build. ({first_line(error)})"
        ) from error
    start = 0 if part is None else part[0]

    def read_into(target: Tensor, begin: int) -> None:
        with path.open("rb") as file:
            fill_from(file, target, begin, path)

    def lazy(fake: Tensor) -> LazyTensor:
        storage: Any = fake.untyped_storage()
        begin = start + _position(fake)
        identity = (str(path), storage._cdata, begin, tuple(fake.shape), fake.stride(), fake.dtype)
        return stored_tensor(read_into, begin, fake.shape, fake.dtype, fake.stride(), identity)

    return recursively_apply(lazy, tree)


def _load(file: Any) -> Any:
    return torch.load(file, map_location="cpu", weights_only=True)


def create_torch_file(path: Any, tree: Any) -> Any:
    """Create a file of `torch.save` whose tensors the caller fills.

    Args:
        path: The new file.
        tree: Plain containers with lazy tensors; tensors with equal `identity` share bytes in the file.

    Returns:
        The same tree with each tensor replaced by its file offset.
    """
    made: dict[object, Tensor] = {}

    def fake(lazy: LazyTensor) -> Tensor:
        key = id(lazy) if lazy.identity is None else lazy.identity
        if key not in made:
            made[key] = torch.empty(lazy.shape, dtype=lazy.dtype, device="cpu")
        return made[key]

    with FakeTensorMode():
        fakes = recursively_apply(fake, tree, test_type=lambda leaf: isinstance(leaf, LazyTensor))
    with torch.serialization.skip_data(materialize_fake_tensors=True):
        torch.save(fakes, path)
    with FakeTensorMode():
        return recursively_apply(_position, _load(path))


def _position(fake: Tensor) -> int:
    """Return the offset in its file of a tensor that was loaded as a fake one."""
    storage: Any = fake.untyped_storage()
    return storage._checkpoint_offset + int(fake.storage_offset()) * fake.dtype.itemsize
