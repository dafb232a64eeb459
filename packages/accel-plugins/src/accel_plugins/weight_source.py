"""Send weights to inference engines: their specifications, all of them, or what changed since the last time.

What changed is found by each rank in its own shards, against a copy of what was sent, and only that is
gathered.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import tee
from typing import TYPE_CHECKING, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from accel_plugins.full_parameters import FullParameters, ParameterSource, fill_buckets
from accel_state import hang_monitor
from accel_state.errors import SettingsError
from accel_state.frozen import frozen

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Parts: TypeAlias = "Iterable[Mapping[str, Tensor]]"
Changes: TypeAlias = "tuple[Tensor, Tensor]"
"""Flat indices, int64, and the values there; both 1-d."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@frozen
class ParameterSpec:
    """What a parameter will be sent as.

    Args:
        name: Its name.
        dtype: Its dtype.
        shape: Its full shape.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


@frozen
class WeightPatch:
    """The elements of a parameter that changed, and their new values.

    Args:
        name: The name of the parameter.
        indices: Their indices in the flattened parameter, ascending, of shape `(n,)`; int32, or int64 where
            the parameter is too large for it.
        values: The new values, of shape `(n,)`, in the dtype in which the parameter is sent.
        full_shape: Shape of the parameter.
        version: The version that the weights have with all patches; the receiver has the one before it.
        checksum: CRC-32 (`zlib.crc32`) of `f"{name} {version}"`, the bytes of the indices, and those of the
            values, one after the other.
    """

    name: str
    indices: Tensor
    values: Tensor
    full_shape: tuple[int, ...]
    version: int
    checksum: int

    @property
    def nbytes(self) -> int:
        """Bytes of indices and values."""
        return self.indices.nbytes + self.values.nbytes


class WeightSource:
    """The weights of a model, to be sent to an inference engine again and again.

    `metadata()` and the iteration meet the contract of `vllm.distributed.weight_transfer.WeightSource`, and
    the patches of `changes()` have the fields of its `SparseWeightPatch`. Call each on every process, and
    iterate to the end. `Accelerator.weight_source` creates it.

    Args:
        stream: Yields all parameters under the names of the model.
        convert: Converts parts of a state dict to the names and layouts that are sent.
        request: Dtype, size of buckets, and the ranks that get tensors.
        sources: Returns the parameters as this rank has them; `None` to not keep track of changes.
        device: The device on which changes are found.

    Attributes:
        version: How often weights were sent: all of them, or what changed.
    """

    def __init__(
        self,
        stream: Callable[[FullParameters], Parts],
        convert: Callable[[Parts], Parts],
        request: FullParameters,
        sources: Callable[[], Sequence[ParameterSource]] | None,
        device: torch.device,
    ) -> None:
        self._stream, self._convert, self._request = stream, convert, request
        self._sources, self._device = sources, device
        self._sent: dict[str, Tensor] = {}
        self.version = 0

    def metadata(self) -> list[ParameterSpec]:
        """Return what an iteration will yield, in its order, without reading or sending a weight.

        The same on every process. Only a model in pipeline stages is sent between them once.
        """
        parts = self._stream(replace(self._request, keep=True, values=False))
        meta = ({name: tensor.to("meta") for name, tensor in part.items()} for part in parts)
        return [
            ParameterSpec(name=name, dtype=tensor.dtype, shape=tuple(tensor.shape))
            for part in self._convert(meta)
            for name, tensor in part.items()
        ]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yield all names and full parameters, as `Accelerator.named_full_parameters`."""
        return self._all(self._convert(self._stream(self._request)))  # which refuses bad arguments at once

    def _all(self, parts: Parts) -> Iterator[tuple[str, Tensor]]:
        for part in parts:
            yield from part.items()
        for source in self._sources() if self._sources is not None else ():
            if self._is_compared(source):
                self._sent[source.names[0]] = self._own(source)[1].to("cpu", copy=True)
        self.version += 1

    @torch.no_grad()
    def changes(self) -> Iterator[WeightPatch]:
        """Yield what changed since weights were sent last; nothing of a parameter that did not.

        Raises:
            SettingsError: The source does not keep track of changes, or nothing was sent yet.
        """
        if self._sources is None or not self.version:
            reason = (
                "was made without track_changes=True" if self._sources is None else "has sent nothing yet"
            )
            raise SettingsError(f"WeightSource.changes(): the source {reason}.")
        return self._changes(self._sources())

    def _changes(self, sources: Sequence[ParameterSource]) -> Iterator[WeightPatch]:
        version = self.version + 1
        pairs, copies = tee(
            pair for bucket in fill_buckets(sources, self._request) for pair in self._changed_parts(bucket)
        )
        values = self._convert(value for value, _ in pairs)
        masks = self._convert(mask for _, mask in copies)
        for value, mask in zip(values, masks, strict=True):
            for name, changed in mask.items():
                if not changed.any():
                    continue
                indices = changed.flatten().nonzero().flatten()
                new = value[name].flatten()[indices]
                indices = indices.to(torch.int32 if changed.numel() <= 2**31 else torch.int64)
                checksum = zlib.crc32(f"{name} {version}".encode())
                for tensor in (indices, new):
                    checksum = zlib.crc32(tensor.cpu().view(torch.uint8).numpy().data, checksum)
                shape = tuple(changed.shape)
                yield WeightPatch(
                    name=name,
                    indices=indices,
                    values=new,
                    full_shape=shape,
                    version=version,
                    checksum=checksum,
                )
        self.version = version

    def _changed_parts(
        self, bucket: Sequence[ParameterSource]
    ) -> Iterator[tuple[dict[str, Tensor], dict[str, Tensor]]]:
        """Yield, for each parameter of a bucket, new values among zeros, and where they are."""
        changes = [self._update(source) for source in bucket]
        for group in next((source.groups for source in bucket if source.groups), ()):
            changes = _gathered(changes, group)
        for source, (indices, values) in zip(bucket, changes, strict=True):
            if not self._request.keep:
                continue
            mask, new = (
                torch.zeros((), dtype=dtype, device=self._device) for dtype in (torch.bool, values.dtype)
            )
            mask, new = mask.expand(source.shape), new.expand(source.shape)
            if len(indices):
                mask, new = mask.contiguous(), new.contiguous()
                mask.view(-1)[indices] = True
                new.view(-1)[indices] = values
            for name in source.names:
                yield {name: new}, {name: mask}

    def _update(self, source: ParameterSource) -> Changes:
        """Return what changed in this rank's shard, and keep its new values."""
        dtype = self._request.dtype_of(source.dtype)
        if not self._is_compared(source):
            empty = torch.zeros(0, dtype=torch.int64, device=self._device)
            return empty, empty.to(dtype)
        indices, values = self._own(source)
        sent = self._sent[source.names[0]]
        is_new = _bits(values) != _bits(sent.to(self._device))
        sent.copy_(values)
        return indices[is_new], values[is_new]

    def _is_compared(self, source: ParameterSource) -> bool:
        """Return whether this rank looks for changes: of a parameter that all have, only those that send."""
        return source.full is None or self._request.keep

    def _own(self, source: ParameterSource) -> Changes:
        """Return the elements of a parameter that this rank has, in ascending order of their indices."""
        dtype = self._request.dtype_of(source.dtype)
        if source.full is not None:
            values = source.full.detach().to(self._device, dtype).flatten()
            return torch.arange(len(values), device=self._device), values
        # What is written both into zeros and into ones is of this rank.
        pattern = torch.zeros(source.shape.numel() * dtype.itemsize, dtype=torch.uint8, device=self._device)
        zeros, ones = (memory.view(dtype).view(source.shape) for memory in (pattern, pattern.bitwise_not()))
        source.write(zeros)
        source.write(ones)
        indices = (_bits(zeros) == _bits(ones)).flatten().nonzero().flatten()
        return indices, zeros.flatten()[indices]


def _bits(tensor: Tensor) -> Tensor:
    """Return the bit patterns of a tensor, so that NaNs are equal and zeros of two signs are not."""
    return tensor.view(_BITS[tensor.dtype.itemsize])


def _gathered(changes: Sequence[Changes], group: ProcessGroup) -> list[Changes]:
    """Return the changes of each parameter on all ranks of a group; two collectives."""
    indices = torch.cat([indices for indices, _ in changes])
    counts = torch.tensor([len(indices) for indices, _ in changes], device=indices.device)
    # Bytes, since the dtypes may differ: all indices, then all values.
    own = torch.cat([indices.view(torch.uint8), *(values.view(torch.uint8) for _, values in changes)])
    with hang_monitor.collective_scope("all_gather of changed parameters"):
        every = [torch.empty_like(counts) for _ in range(group.size())]
        dist.all_gather(every, counts, group=group)
        counted = torch.stack(every).tolist()
        sizes = [
            sum(count * (8 + values.itemsize) for count, (_, values) in zip(row, changes, strict=True))
            for row in counted
        ]
        rows = [own.new_empty(max(sizes)) for _ in sizes]
        if max(sizes):
            padded = own.new_empty(max(sizes))
            padded[: len(own)] = own
            dist.all_gather(rows, padded, group=group)
    found: list[list[Changes]] = [[] for _ in changes]
    for row, numbers in zip(rows, counted, strict=True):
        lengths = [8 * sum(numbers)]
        lengths += [number * values.itemsize for number, (_, values) in zip(numbers, changes, strict=True)]
        head, *parts = row[: sum(lengths)].split(lengths)
        split = head.clone().view(torch.int64).split(numbers)
        for entry, (_, like), index, part in zip(found, changes, split, parts, strict=True):
            entry.append((index, part.clone().view(like.dtype)))
    return [(torch.cat([i for i, _ in entry]), torch.cat([v for _, v in entry])) for entry in found]
