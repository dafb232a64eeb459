"""Cut shards from full tensors and gather them; full state dicts of sharded models and optimizers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from accel_ops.weights.mapped import release
from accel_plugins.full_parameters import FullParameters, ParameterSource, iter_gathered, named_parameters_of
from accel_plugins.sharding.state import ShardedStates, model_variables, state_by_index, state_by_name
from accel_state.frozen import frozen
from accel_state.torch_private import (
    DTensorSpec,
    StridedShard,
    TensorMeta,
    compute_local_shape_and_global_offset,
)

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from accel_plugins.strategy import StateDict


def is_packed(tensor: Any) -> bool:
    """Return whether a shard has several slices of the tensor, such as rows of two packed weights.

    Its placement is strided along a dim, without another shard of this dim that explains the stride.
    """
    return isinstance(tensor, DTensor) and bool(_packed_dims(tensor))


def _packed_dims(tensor: DTensor) -> set[int]:
    placements: Any = tensor.placements
    strided = {placement.dim for placement in placements if isinstance(placement, StridedShard)}
    return strided - {placement.dim for placement in placements if isinstance(placement, Shard)}


def shard_like(
    full: Tensor, like: Tensor, device: torch.device | None = None, *, keep_type: bool = False
) -> Tensor:
    """Copy this rank's shard of a full tensor, sharded like another tensor, without communication.

    Args:
        full: The full tensor, on any device.
        like: A tensor of the same shape; if it is not a `DTensor`, the full tensor is copied.
        device: Device of the result; that of `like` if `None`.
        keep_type: Whether the shard has the tensor subclass of the shard of `like`, such as a library's.

    Returns:
        A new tensor of the dtype of `full`, a `DTensor` if `like` is one.

    Example:
        >>> shard_like(torch.ones(2), torch.zeros(2))
        tensor([1., 1.])
    """
    full, target = full.detach(), like.device if device is None else device
    if not isinstance(like, DTensor):
        return torch.empty_like(full, device=target).copy_(full)
    if is_packed(like):
        return distribute_tensor(full.to(target), like.device_mesh, like.placements, src_data_rank=None)
    shape, offset = compute_local_shape_and_global_offset(like.shape, like.device_mesh, like.placements)
    region = tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))
    empty = torch.empty(shape, dtype=full.dtype, device=target)
    if keep_type:
        local: Any = like.detach()
        empty = torch.empty_like(local.to_local(), dtype=full.dtype, device=target)
    return with_local(like, empty.copy_(full[region]))


def with_local(like: Any, local: Tensor) -> DTensor:
    """Wrap a local shard, on any device, in a DTensor with the layout of another DTensor."""
    meta = TensorMeta(like.shape, torch.empty(like.shape, device="meta").stride(), local.dtype)
    # `from_local` would move a shard that is offloaded to the CPU to the device of the mesh.
    return DTensor(
        local, DTensorSpec(like.device_mesh, like.placements, tensor_meta=meta), requires_grad=False
    )  # pyright: ignore[reportCallIssue] - FSDP does the same


def group_tied_names(state: Mapping[str, Any]) -> list[tuple[tuple[str, ...], Any]]:
    """Group the names of a state dict by value: tied weights have several.

    Example:
        >>> group_tied_names({"a": (tied := torch.ones(1)), "b": 3, "c": tied})
        [(('a', 'c'), tensor([1.])), (('b',), 3)]
    """
    names: dict[int, list[str]] = {}
    for name, value in state.items():
        names.setdefault(id(value), []).append(name)
    return [(tuple(group), state[group[0]]) for group in names.values()]


def gather_full_tensor(tensor: Tensor, device: torch.device) -> Tensor:
    """All-gather a full tensor, detached; a collective over the mesh if the tensor is a `DTensor`.

    A shard on another device than that of the collective is copied to it.
    """
    detached: Any = tensor.detach()
    if not isinstance(detached, DTensor):
        return detached
    if detached.device.type != device.type:
        detached = detached.to(device)
    return detached.full_tensor()


def sharded_sources(model: nn.Module) -> list[ParameterSource]:
    """Return a model's parameters, DTensors or not, as sources for `iter_gathered`."""
    return [source_of(names, value) for names, value in named_parameters_of(model_variables(model))]


def source_of(names: Sequence[str], parameter: Tensor) -> ParameterSource:
    """Return a parameter, or a shard of it, as a source for `iter_gathered`."""
    value: Any = parameter.detach()
    full, groups = value, ()
    if isinstance(value, DTensor):
        mesh, placements = value.device_mesh, value.placements
        groups = tuple(
            mesh.get_group(axis)
            for axis, placement in enumerate(placements)
            if isinstance(placement, (Shard, StridedShard)) and mesh.size(axis) > 1
        )
        full = None if groups else value.to_local()
    return ParameterSource(
        names=names,
        shape=value.shape,
        dtype=value.dtype,
        full=full,
        groups=groups,
        write=partial(write_shard, value),
    )


def write_shard(shard: DTensor, full: Tensor) -> None:
    """Write this rank's shard into a full tensor, without communication.

    Args:
        shard: A DTensor sharded along any dims.
        full: A tensor of the same shape, on any device and of any dtype; other elements are unchanged.
    """
    mesh, placements, packed = shard.device_mesh, shard.placements, _packed_dims(shard)
    local = shard.to_local()

    def only(dims: set[int]) -> list[Any]:
        return [row if getattr(row, "dim", None) in dims else Replicate() for row in placements]

    others = {*range(shard.dim())} - packed
    shape, offset = compute_local_shape_and_global_offset(shard.shape, mesh, only(others))
    region = full[tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))]
    if not packed:
        region.copy_(local)
        return
    # Number the rows, and shard the numbers like the rows.
    [dim] = packed
    numbers = torch.arange(shard.shape[dim], device=mesh.device_type)
    numbers = numbers.view([-1 if index == dim else 1 for index in range(shard.dim())])
    own: Any = distribute_tensor(numbers, mesh, only(packed), src_data_rank=None)
    region.index_copy_(dim, own.to_local().flatten().to(full.device), local.to(full))


@frozen
class ShardsPersister:
    """Gather and load full state dicts through any `ShardedStates`.

    `sources` returns the parameters of a model for `iter_gathered`.
    """

    shards: ShardedStates
    device: torch.device
    sources: Callable[[nn.Module], Sequence[ParameterSource]] = sharded_sources

    def full_state_dict(self, model: nn.Module, *, keep: bool = True) -> StateDict:
        state = self.shards.model_tensors(model)
        gathered: StateDict = {}
        for tensors in self._iter_gathered(state, keep=keep):
            gathered |= tensors
        return {name: gathered[name] for name in state} if keep else {}

    def iter_full_state_dict(self, model: nn.Module, *, keep: bool = True) -> Iterator[StateDict]:
        return self._iter_gathered(self.shards.model_tensors(model), keep=keep)

    def iter_full_parameters(self, model: nn.Module, request: FullParameters) -> Iterator[tuple[str, Tensor]]:
        return iter_gathered(self.sources(model), request, self.device)

    def load_full_state_dict(self, model: nn.Module, state: Mapping[str, Any], **options: Any) -> Any:
        like = self.shards.model_tensors(model)
        shards = {
            name: _copy_shard(value, like[name])
            if isinstance(value, Tensor) and isinstance(like.get(name), Tensor)
            else value
            for name, value in state.items()
        }
        return self.shards.load_model(model, shards, **options)

    def full_optimizer_state(
        self, optimizer: Optimizer, models: Sequence[nn.Module], *, keep: bool = True
    ) -> StateDict:
        state = self.shards.optimizer_tensors(optimizer, models)
        names = [group["params"] for group in state["param_groups"]]
        return state_by_index(self._gather(state, keep=keep), names)

    def load_full_optimizer_state(
        self, optimizer: Optimizer, models: Sequence[nn.Module], state: Mapping[str, Any]
    ) -> None:
        groups = self.shards.optimizer_tensors(optimizer, models)["param_groups"]
        named = state_by_name(state, [group["params"] for group in groups])
        allocate = self.shards.state_allocator(optimizer, models)

        def shard(name: str, key: str, value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            return _copy_shard(value, allocate(name, key, value.shape, value.dtype))

        named["state"] = {
            name: {key: shard(name, key, value) for key, value in values.items()}
            for name, values in named["state"].items()
        }
        self.shards.load_optimizer(optimizer, models, named)

    def _iter_gathered(self, state: StateDict, *, keep: bool) -> Iterator[StateDict]:
        for names, value in group_tied_names(state):
            full = self._gather(value, keep=keep)
            yield dict.fromkeys(names, full) if keep else {}
            del full  # freed before the next tensor is gathered

    def _gather(self, state: Any, *, keep: bool) -> Any:
        if isinstance(state, dict):
            items: dict[Any, Any] = state
            full_items = {key: self._gather(value, keep=keep) for key, value in items.items()}
            return (
                full_items if keep else {key: value for key, value in full_items.items() if value is not None}
            )
        if not isinstance(state, Tensor):
            return state
        full = gather_full_tensor(state, self.device)
        return full.cpu() if keep else None


@torch.no_grad()
def _copy_shard(full: Tensor, target: Any) -> Tensor:
    """Copy this rank's shard of a full tensor into a target tensor, and return the target.

    Mapped memory of the full tensor is released. If the shapes differ, the full tensor is returned; loading
    it raises the error.
    """
    if target.shape != full.shape:
        return full
    local, region = target, ()
    if isinstance(target, DTensor):
        local: Any = target.to_local()
        shape, offset = compute_local_shape_and_global_offset(
            target.shape, target.device_mesh, target.placements
        )
        region = tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))
    local.copy_(full[region])
    release(full)
    return target
