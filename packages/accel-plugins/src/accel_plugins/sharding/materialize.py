"""Materialise a sharded meta model from rank 0's weights, one tensor at a time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.weak import WeakIdKeyDictionary

from accel_plugins.sharding.optimizers import hook_of
from accel_plugins.sharding.shards import gather_full_tensor, names_of_each, shard_like

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from accel_state.runtime import Runtime


@dataclass(slots=True)
class ModelState:
    """State of a model before it was moved to meta.

    Args:
        parameters: Full parameters by name, on the rank that keeps them; tied ones under their first name.
        names: All names of each parameter and buffer, by the first one.
        before: Weak map from the original parameters to their names.
        hooks: Hooks on the gradient of each parameter that has some, as torch keeps them.
    """

    parameters: dict[str, Tensor] = field(default_factory=dict[str, Any])
    buffers: dict[str, Tensor] = field(default_factory=dict[str, Any])
    dtypes: dict[str, torch.dtype] = field(default_factory=dict[str, Any])
    attributes: dict[str, dict[str, Any]] = field(default_factory=dict[str, Any])
    names: dict[str, list[str]] = field(default_factory=dict[str, Any])
    before: Any = field(default_factory=WeakIdKeyDictionary)
    hooks: dict[str, tuple[Any, Any]] = field(default_factory=dict[str, Any])


def to_meta(
    model: nn.Module,
    *,
    keep: bool,
    device: torch.device,
    dtype_of: Callable[[Tensor], torch.dtype] | None = None,
) -> ModelState:
    """Move a model to the meta device in place, and return its state; names and ties are kept.

    Args:
        model: Any model; parameters that are sharded already are all-gathered.
        keep: Whether this rank keeps the full tensors.
        device: Device of the collectives.
        dtype_of: Returns a parameter's new dtype; unchanged if `None`.
    """
    values = ModelState()
    for kind, named in (
        (values.parameters, model.named_parameters(remove_duplicate=False)),
        (values.buffers, model.named_buffers(remove_duplicate=False)),
    ):
        first: dict[int, str] = {}
        for name, tensor in named:
            known = first.setdefault(id(tensor), name)
            values.names.setdefault(known, []).append(name)
            if known != name:
                continue
            values.dtypes[name] = tensor.dtype
            if kind is values.parameters:
                if hook_of(tensor):
                    values.hooks[name] = (tensor._backward_hooks, tensor._post_accumulate_grad_hooks)  # pyright: ignore[reportPrivateUsage] - have no other name
                values.before[tensor] = name
                values.dtypes[name] = dtype_of(tensor) if dtype_of else tensor.dtype
            values.attributes[name] = {} if _has_own_type(tensor) else dict(vars(tensor))
            full = gather_full_tensor(tensor, device) if isinstance(tensor, DTensor) else tensor.detach()
            if keep:
                kind[name] = full
    _empty(model, values)
    return values


def materialize_from_rank0(
    model: nn.Module, values: ModelState, runtime: Runtime, *, parameters_on: torch.device
) -> None:
    """Broadcast rank 0's tensors one by one; every rank materialises its shards, and frees what it has done.

    The values of rank 0 count also where every rank has some: ranks that seeded differently would otherwise
    train a model that is put together of several. That costs one broadcast of the model in `prepare`, as with
    DDP. Buffers and collectives use the device of the run.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    buffers = dict(model.named_buffers(remove_duplicate=False))
    for name, names in values.names.items():
        is_parameter = name in parameters
        like = parameters[name] if is_parameter else buffers[name]
        available = values.parameters if is_parameter else values.buffers
        full = _from_main(available.pop(name, None), like, values.dtypes[name], runtime)
        target = parameters_on if is_parameter else runtime.device
        shard = shard_like(full, like, target, keep_type=is_parameter)
        del full
        if is_parameter:
            shard = nn.Parameter(shard, requires_grad=like.requires_grad)
            vars(shard).update(values.attributes[name])
            if name in values.hooks:  # the same dictionaries: a handle still removes its hook
                shard._backward_hooks, shard._post_accumulate_grad_hooks = values.hooks[name]  # pyright: ignore[reportAttributeAccessIssue, reportPrivateUsage]
        for one in names:
            put_tensor(model, one, shard)


def put_tensor(model: nn.Module, name: str, tensor: Tensor) -> None:
    """Replace the parameter or buffer of a name in a model."""
    path, _, leaf = name.rpartition(".")
    owner = model.get_submodule(path)
    if leaf in owner._buffers:  # pyright: ignore[reportPrivateUsage] - `setattr` would refuse a parameter there
        owner._buffers[leaf] = tensor  # pyright: ignore[reportPrivateUsage]
    else:
        setattr(owner, leaf, tensor)


def _from_main(found: Tensor | None, like: Tensor, dtype: torch.dtype, runtime: Runtime) -> Tensor:
    if found is None or runtime.topology.rank != 0:
        full = torch.empty(like.shape, dtype=dtype, device=runtime.device)
    else:
        full = found.to(runtime.device, dtype).contiguous()
    runtime.collectives.broadcast(full, src=0)
    return full


def _empty(model: nn.Module, values: ModelState) -> None:
    """Move a model to the meta device; tied tensors stay tied."""
    for names in values.names.values():
        tensor = _get(model, names[0])
        if _has_own_type(tensor):  # `Module.to` refuses to swap what somebody refers to weakly
            meta = tensor.detach().to("meta", values.dtypes[names[0]])
            for name in names:
                put_tensor(model, name, nn.Parameter(meta, requires_grad=tensor.requires_grad))
    nn.Module.to(model, device="meta")  # a subclass may refuse to be moved
    for names in values.names.values():
        tensor = _get(model, names[0])
        if _has_own_type(tensor):
            continue
        tensor.data = tensor.data.to(values.dtypes[names[0]])
        if len(names) > 1:
            for name in names[1:]:
                put_tensor(model, name, tensor)


def _has_own_type(tensor: Tensor) -> bool:
    """Whether a library has put a type of its own around the values, for its kernels."""
    return is_traceable_wrapper_subclass(tensor) and not isinstance(tensor, DTensor)


def _get(model: nn.Module, name: str) -> Any:
    path, _, leaf = name.rpartition(".")
    return getattr(model.get_submodule(path), leaf)


def load_from_main(model: nn.Module, state: Any, runtime: Runtime, *, on_cpu: bool) -> None:
    """Load a full state dict of rank 0 into a sharded model, materialised or not."""
    values = ModelState()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        values.names[name] = [name]
        values.dtypes[name] = tensor.dtype
        values.attributes[name] = dict(vars(tensor))
    for names, _ in names_of_each(dict(model.named_parameters(remove_duplicate=False))):
        values.names[names[0]] = [*names]
    if runtime.topology.is_main:
        parameters = dict(model.named_parameters())
        values.parameters = {name: state[name] for name in values.names if name in parameters}
        values.buffers = {
            name: state[name] for name in values.names if name not in parameters and name in state
        }
    missing = runtime.collectives.all_gather_object(
        [name for name in values.names if name not in (state or ())]
    )[0]
    for name in missing:  # buffers that are not persistent
        values.names.pop(name)
    materialize_from_rank0(
        model, values, runtime, parameters_on=torch.device("cpu") if on_cpu else runtime.device
    )
