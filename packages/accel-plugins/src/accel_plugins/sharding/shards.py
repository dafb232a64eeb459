"""Cut shards from full tensors and gather them; full state dicts of sharded models and optimizers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from accel_ops.modules import extract_model_from_parallel
from accel_ops.weights.mapped import release
from accel_ops.weights.regions import packed_dims, region_of, rows_of
from accel_plugins.full_parameters import (
    ParameterSource,
    group_tied_names,
    named_parameters_of,
)
from accel_plugins.sharding.state import (
    ABSENT,
    StateAllocator,
    StateForm,
    allocator_like,
    check_groups,
    model_variables,
    names_to_indices,
    parameter_names,
    state_by_index,
    state_by_name,
    strip_wrapper_prefixes,
)
from accel_plugins.unsharded import States
from accel_state.torch_private import DTensorSpec, StridedShard, TensorMeta

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from accel_plugins.strategy import StateDict


def is_packed(tensor: Any) -> bool:
    """Return whether a shard has several slices of the tensor; see `packed_dims`."""
    return isinstance(tensor, DTensor) and bool(packed_dims(tensor))


def shard_like(
    full: Tensor, like: Tensor, device: torch.device | None = None, *, keep_type: bool = False
) -> Tensor:
    """Copy this rank's shard of a full tensor, sharded like another tensor, without communication.

    With `keep_type` it has the tensor subclass of the shard of `like`, such as a library's. The result is on
    the device of `like` by default, has the dtype of `full`, and is a `DTensor` if `like` is one.
    """
    full, target = full.detach(), like.device if device is None else device
    if not isinstance(like, DTensor):
        return torch.empty_like(full, device=target).copy_(full)
    if is_packed(like):
        return distribute_tensor(full.to(target), like.device_mesh, like.placements, src_data_rank=None)
    part = full[region_of(like)]
    options: dict[str, Any] = {"dtype": full.dtype, "device": target}
    local: Any = like.detach()
    empty = torch.empty_like(local.to_local(), **options) if keep_type else torch.empty(part.shape, **options)
    return with_local(like, empty.copy_(part))


def with_local(like: Any, local: Tensor) -> DTensor:
    """Wrap a local shard, on any device, in a DTensor with the layout of another DTensor."""
    meta = TensorMeta(like.shape, torch.empty(like.shape, device="meta").stride(), local.dtype)
    # `from_local` would move a shard that is offloaded to the CPU to the device of the mesh.
    return DTensor(
        local, DTensorSpec(like.device_mesh, like.placements, tensor_meta=meta), requires_grad=False
    )  # pyright: ignore[reportCallIssue] - FSDP does the same


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
    """Write this rank's shard into a full tensor, on any device and of any dtype, without communication."""
    packed, local = packed_dims(shard), shard.to_local()
    region = full[region_of(shard, packed)]
    if not packed:
        region.copy_(local)
        return
    [dim] = packed
    region.index_copy_(dim, rows_of(shard, dim).to(full.device), local.to(full))


class ShardedStates(States):
    """States whose tensors may be `DTensor`s, and full states gathered from them.

    Engines whose tensors are not in the models and optimizers override the methods for sharded states; full
    states are gathered from what those return. Packed tensors (see `is_packed`) are gathered, since a DCP
    shard is one contiguous slice.
    """

    is_sharded = True

    def __init__(self, device: torch.device, form: Callable[[], StateForm] = lambda: StateForm.FULL) -> None:
        self._device, self._form = device, form

    def form(self) -> StateForm:
        return self._form()

    # Sharded states.

    def model_tensors(self, model: nn.Module) -> StateDict:
        """Return the state dict of the model; tied weights are one object."""
        state = model_variables(model)
        unpacked = {id(value): _unpack(value) for value in state.values()}
        return {name: unpacked[id(value)] for name, value in state.items()}

    def load_model(self, model: nn.Module, state: StateDict, **options: Any) -> Any:
        core = extract_model_from_parallel(model, keep_torch_compile=False)
        own = core.state_dict(keep_vars=True)
        names = {strip_wrapper_prefixes(name): name for name in own}
        renamed = {names.get(name, name): value for name, value in state.items() if value is not ABSENT}
        packed = {name: _pack(value, own.get(name)) for name, value in renamed.items()}
        return core.load_state_dict(packed, **options)

    def own_names(self, optimizer: Optimizer, models: Sequence[nn.Module]) -> list[list[str]]:
        """Return the names of an optimizer's parameters on this rank, group by group."""
        return parameter_names(optimizer, models)

    def optimizer_tensors(self, optimizer: Optimizer, models: Sequence[nn.Module]) -> StateDict:
        state = state_by_name(optimizer.state_dict(), self.own_names(optimizer, models))
        unpacked = {
            name: {key: _unpack(value) for key, value in values.items()}
            for name, values in state["state"].items()
        }
        return {**state, "state": unpacked}

    def state_allocator(self, optimizer: Optimizer, models: Sequence[nn.Module]) -> StateAllocator:
        """Return an allocator of the optimizer's present tensors, and others sharded like the parameter."""
        parameters = self.parameters_by_name(optimizer, models)
        plain = {name: parameter for name, parameter in parameters.items() if not is_packed(parameter)}
        own = {name: optimizer.state.get(parameter, {}) for name, parameter in plain.items()}
        allocate_like = allocator_like(plain)

        def allocate(name: str, key: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
            current = own.get(name, {}).get(key)
            if isinstance(current, Tensor) and (current.shape, current.dtype) == (shape, dtype):
                return current.detach()
            return allocate_like(name, key, shape, dtype)

        return allocate

    def load_optimizer(self, optimizer: Optimizer, models: Sequence[nn.Module], state: StateDict) -> None:
        saved = [group["params"] for group in state["param_groups"]]
        check_groups(saved, self.group_names(optimizer, models))
        parameters = self.parameters_by_name(optimizer, models)
        packed = {
            name: {key: _pack(value, parameters.get(name)) for key, value in values.items()}
            for name, values in state["state"].items()
        }
        own = self.own_names(optimizer, models)
        optimizer.load_state_dict(names_to_indices({**state, "state": packed}, own))

    def group_names(self, optimizer: Optimizer, models: Sequence[nn.Module]) -> Sequence[Sequence[str]]:
        """Return the names of the parameters of all ranks, group by group."""
        return self.own_names(optimizer, models)

    def parameters_by_name(self, optimizer: Optimizer, models: Sequence[nn.Module]) -> dict[str, Tensor]:
        """Return the parameters of an optimizer by `own_names`."""
        names = chain.from_iterable(self.own_names(optimizer, models))
        return dict(zip(names, chain.from_iterable(g["params"] for g in optimizer.param_groups), strict=True))

    # Full states.

    def sources(self, model: nn.Module) -> Sequence[ParameterSource]:
        return [source_of(names, value) for names, value in named_parameters_of(model_variables(model))]

    def full_state_dict(self, model: nn.Module, *, keep: bool = True) -> StateDict:
        state = self.model_tensors(model)
        gathered: StateDict = {}
        for tensors in self._iter_gathered(model, state, keep=keep):
            gathered |= tensors
        return {name: gathered[name] for name in state if name in gathered}

    def iter_full_state_dict(self, model: nn.Module, *, keep: bool = True) -> Iterator[StateDict]:
        return self._iter_gathered(model, self.model_tensors(model), keep=keep)

    def load_full_state_dict(self, model: nn.Module, state: Mapping[str, Any], **options: Any) -> Any:
        like = self.model_tensors(model)
        shards = {
            name: _copy_shard(value, like[name])
            if isinstance(value, Tensor) and isinstance(like.get(name), Tensor)
            else value
            for name, value in state.items()
            if like.get(name) is not ABSENT
        }
        return self.load_model(model, shards, **options)

    def full_optimizer_state(
        self, optimizer: Optimizer, models: Sequence[nn.Module], *, keep: bool = True
    ) -> StateDict:
        state = self.optimizer_tensors(optimizer, models)
        names = [group["params"] for group in state["param_groups"]]
        return state_by_index(self._gather(state, keep=keep), names)

    def load_full_optimizer_state(
        self, optimizer: Optimizer, models: Sequence[nn.Module], state: Mapping[str, Any]
    ) -> None:
        named = state_by_name(state, self.group_names(optimizer, models))
        allocate = self.state_allocator(optimizer, models)

        def shard(name: str, key: str, value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            target = allocate(name, key, value.shape, value.dtype)
            return value if target is ABSENT else _copy_shard(value, target)

        named["state"] = {
            name: {key: shard(name, key, value) for key, value in values.items()}
            for name, values in named["state"].items()
        }
        self.load_optimizer(optimizer, models, named)

    def _iter_gathered(self, model: nn.Module, state: StateDict, *, keep: bool) -> Iterator[StateDict]:
        del model
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
        full = gather_full_tensor(state, self._device)
        return full.cpu() if keep else None


def _unpack(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    detached: Any = value.detach()
    return detached.full_tensor() if is_packed(detached) else detached


def _pack(value: Any, like: Any) -> Any:
    if isinstance(value, DTensor) and isinstance(like, Tensor) and not isinstance(like, DTensor):
        return value.to_local()  # replicated over the stages of a pipeline
    is_full = isinstance(value, Tensor) and not isinstance(value, DTensor)
    if is_full and is_packed(like) and value.shape == like.shape:
        return shard_like(value, like)
    return value


@torch.no_grad()
def _copy_shard(full: Tensor, target: Any) -> Tensor:
    """Copy this rank's shard of a full tensor into a target tensor, and return the target.

    Mapped memory of the full tensor is released. If the shapes differ, the full tensor is returned; loading
    it raises the error.
    """
    if target.shape != full.shape:
        return full
    if isinstance(target, DTensor):
        target.to_local().copy_(full[region_of(target)])
    else:
        target.copy_(full)
    release(full)
    return target
