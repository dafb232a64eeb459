"""Gather the full parameters of a model, bucket by bucket.

A bucket is a buffer of zeros into which every rank writes its shards; a sum over the ranks then gives the
full tensors, whatever the placements. It adds bit patterns, as integers: a shard and zeros give exactly the
shard, negative zeros and NaNs included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from accel_state import hang_monitor
from accel_state.frozen import frozen

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_ALIGNMENT = 16  # bytes, so that every tensor of a bucket is aligned for its dtype


@frozen
class FullParameters:
    """Options for iterating over all full parameters.

    Args:
        bucket_bytes: Largest size of a bucket; a larger parameter gets a separate bucket.
        dtype: Dtype of floating-point results; each parameter's own if `None`.
        keep: Whether this rank needs the tensors. Otherwise it only takes part in the collectives.
        is_reduced: Whether only the first rank of every process group needs them.
        selects: Whether a parameter is gathered, by name; the same on all ranks.
        values: Whether values are needed, and not only dtypes and shapes, of tensors on the meta device.
    """

    bucket_bytes: int
    dtype: torch.dtype | None = None
    keep: bool = True
    is_reduced: bool = False
    selects: Callable[[str], bool] = lambda _: True
    values: bool = True

    def dtype_of(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which a parameter is yielded."""
        return self.dtype if self.dtype is not None and dtype.is_floating_point else dtype


@frozen
class ParameterSource:
    """A parameter of a prepared model, as this rank has it.

    Args:
        names: Its names in the unwrapped model; tied weights have several.
        shape: Shape of the full parameter.
        dtype: Dtype of the parameter.
        full: The full parameter, if this rank has it.
        groups: Process groups over which it is sharded, one for each axis of a mesh.
        write: Writes this rank's shard into a full tensor of zeros, on any device and of any dtype. The ranks
            of the groups write different elements.
    """

    names: Sequence[str]
    shape: torch.Size
    dtype: torch.dtype
    full: Tensor | None = None
    groups: tuple[ProcessGroup, ...] = ()
    write: Callable[[Tensor], object] = lambda _: None


def group_tied_names(state: Mapping[str, Any]) -> list[tuple[tuple[str, ...], Any]]:
    """Group the names of a state dict by value: tied weights have several."""
    names: dict[int, list[str]] = {}
    for name, value in state.items():
        names.setdefault(id(value), []).append(name)
    return [(tuple(group), state[group[0]]) for group in names.values()]


def named_parameters_of(state: Mapping[str, Any]) -> list[tuple[tuple[str, ...], nn.Parameter]]:
    """Return the parameters in a state dict of `keep_vars=True`, each with all its names.

    Example:
        >>> model = nn.BatchNorm1d(2)
        >>> [names for names, _ in named_parameters_of(model.state_dict(keep_vars=True))]
        [('weight',), ('bias',)]
    """
    return group_tied_names({name: value for name, value in state.items() if isinstance(value, nn.Parameter)})


def iter_gathered(
    sources: Sequence[ParameterSource],
    request: FullParameters,
    device: torch.device = torch.device("cpu"),  # noqa: B008 - immutable
) -> Iterator[tuple[str, Tensor]]:
    """Yield names and full tensors. Every rank iterates over all.

    The tensors of a bucket are views of one buffer, which is freed with the last of them. A full parameter
    that needs no other dtype is yielded itself, detached.

    Args:
        sources: All parameters of the model, in the same order on every rank.
        request: Their dtype, the size of buckets, and the ranks that need them.
        device: The device on which shards are gathered.
    """
    for bucket in fill_buckets(sources, request):
        if request.values:
            full = _gather_bucket(bucket, request, device)
        else:
            full = [
                torch.empty(source.shape, dtype=request.dtype_of(source.dtype), device="meta")
                for source in bucket
            ]
        for source, tensor in zip(bucket, full, strict=True):
            for name in source.names if request.keep else ():
                yield name, tensor


def fill_buckets(
    sources: Sequence[ParameterSource], request: FullParameters
) -> Iterator[list[ParameterSource]]:
    """Yield consecutive parameters that are sharded over the same groups; full ones join any bucket."""
    bucket: list[ParameterSource] = []
    groups: tuple[ProcessGroup, ...] = ()
    size = 0
    for source in sources:
        if not any(map(request.selects, source.names)):
            continue
        added = _bytes_in_bucket(source, request)
        if bucket and (size + added > request.bucket_bytes or (groups and source.groups not in ((), groups))):
            yield bucket
            bucket, groups, size = [], (), 0
        bucket.append(source)
        groups = groups or source.groups
        size += added
    if bucket:
        yield bucket


def _bytes_in_bucket(source: ParameterSource, request: FullParameters) -> int:
    dtype = request.dtype_of(source.dtype)
    if source.full is not None and source.dtype == dtype:
        return 0  # the parameter itself
    return -(-source.shape.numel() * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT


@torch.no_grad()
def _gather_bucket(
    bucket: Sequence[ParameterSource], request: FullParameters, device: torch.device
) -> list[Tensor]:
    """Return the full tensors of a bucket; one collective over each of its groups."""
    sharded = [source for source in bucket if source.full is None]
    memory = torch.zeros(
        sum(_bytes_in_bucket(source, request) for source in sharded), dtype=torch.uint8, device=device
    )
    tensors: list[Tensor] = []
    begin = 0
    for source in bucket:
        dtype = request.dtype_of(source.dtype)
        if source.full is not None:
            tensors.append(source.full.to(dtype) if request.keep else source.full)
            continue
        end = begin + source.shape.numel() * dtype.itemsize
        tensor = memory[begin:end].view(dtype).view(source.shape)
        source.write(tensor)
        tensors.append(tensor)
        begin += _bytes_in_bucket(source, request)
    groups = sharded[0].groups if sharded and memory.numel() else ()
    for group in groups:
        with hang_monitor.collective_scope("all_reduce of full parameters"):
            if request.is_reduced:
                dist.reduce(memory.view(torch.int32), group=group, group_dst=0)
            else:
                dist.all_reduce(memory.view(torch.int32), group=group)
    return tensors
