"""Models without values that get those of rank 0, each rank its part, one tensor after the other."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from accel_plugins.sharding.shards import gather_full_tensor, part_like

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from accel_state.runtime import Runtime


@dataclass(slots=True)
class ModelState:
    """What was in a model before it was emptied.

    Args:
        parameters: Name to tensor, on the rank that has them; of tied parameters the first name.
        buffers: The same of buffers.
        dtypes: Name to dtype of both.
        attributes: What users have attached to parameters.
        names: Every name of each parameter and buffer, the first one first.
        before: Weakly, every parameter as it was, to its name.
    """

    parameters: dict[str, Tensor] = field(default_factory=dict[str, Any])
    buffers: dict[str, Tensor] = field(default_factory=dict[str, Any])
    dtypes: dict[str, torch.dtype] = field(default_factory=dict[str, Any])
    attributes: dict[str, dict[str, Any]] = field(default_factory=dict[str, Any])
    names: dict[str, list[str]] = field(default_factory=dict[str, Any])
    before: Any = field(default_factory=WeakIdKeyDictionary)


def to_meta(
    model: nn.Module,
    *,
    keep: bool,
    device: torch.device,
    dtype_of: Callable[[Tensor], torch.dtype] | None = None,
) -> ModelState:
    """Take the values out of a model, which is on the meta device afterwards; names and ties stay.

    Args:
        model: Any; parameters that are divided already are brought together, on every rank that holds them.
        keep: Whether this rank's values are the ones that count.
        device: Where ranks communicate.
        dtype_of: The dtype that a parameter gets; its own if `None`.
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
                values.before[tensor] = name
                values.dtypes[name] = dtype_of(tensor) if dtype_of else tensor.dtype
            values.attributes[name] = dict(vars(tensor))
            full = gather_full_tensor(tensor, device) if isinstance(tensor, DTensor) else tensor.detach()
            if keep:
                kind[name] = full
    _empty(model, values)
    return values


def materialize_from_rank0(
    model: nn.Module, values: ModelState, runtime: Runtime, *, parameters_on: torch.device
) -> None:
    """Give every rank its parts of the values that rank 0 has taken, one tensor after the other.

    The values of rank 0 count also where every rank has some: ranks that seeded differently would otherwise
    train a model that is put together of several. That costs one broadcast of the model in `prepare`, as with
    DDP.

    Args:
        model: Emptied by `to_meta`, and divided since then.
        values: On rank 0 with tensors, which are let go one by one.
        runtime: Of this process.
        parameters_on: Where parameters stay; buffers, and what is communicated, are on the device of the run.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    buffers = dict(model.named_buffers(remove_duplicate=False))
    for name, names in values.names.items():
        is_parameter = name in parameters
        like = parameters[name] if is_parameter else buffers[name]
        available = values.parameters if is_parameter else values.buffers
        full = _from_main(available.pop(name, None), like, values.dtypes[name], runtime)
        target = parameters_on if is_parameter else runtime.device
        part = part_like(full, like, target)
        del full
        if is_parameter:
            part = nn.Parameter(part, requires_grad=like.requires_grad)
            vars(part).update(values.attributes[name])
        for one in names:
            put_tensor(model, one, part)


def put_tensor(model: nn.Module, name: str, tensor: Tensor) -> None:
    """Replace a parameter or buffer of a model by its name."""
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
    """Put a model on the meta device, tied tensors tied."""
    nn.Module.to(model, device="meta")  # a subclass may refuse to be moved
    for names in values.names.values():
        tensor = _get(model, names[0])
        tensor.data = tensor.data.to(values.dtypes[names[0]])
        if len(names) > 1:
            for name in names[1:]:
                put_tensor(model, name, tensor)


def _get(model: nn.Module, name: str) -> Any:
    path, _, leaf = name.rpartition(".")
    return getattr(model.get_submodule(path), leaf)


def tied_names(model: nn.Module) -> Iterator[list[str]]:
    """The names of every parameter that has several."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return (group for group in names.values() if len(group) > 1)


def load_from_main(model: nn.Module, state: Any, runtime: Runtime, *, on_cpu: bool) -> None:
    """Give a divided model, with values or without, those of a whole state dict that rank 0 has.

    Args:
        model: Every rank has its parts.
        state: Name to tensor, on rank 0.
        runtime: Of this process.
        on_cpu: Whether parameters stay on the CPU.
    """
    values = ModelState()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        values.names[name] = [name]
        values.dtypes[name] = tensor.dtype
        values.attributes[name] = dict(vars(tensor))
    for group in tied_names(model):
        values.names[group[0]] = group
    if runtime.topology.is_main:
        own = dict(model.named_parameters())
        values.parameters = {name: state[name] for name in values.names if name in own}
        values.buffers = {name: state[name] for name in values.names if name not in own and name in state}
    missing = runtime.collectives.all_gather_object(
        [name for name in values.names if name not in (state or ())]
    )[0]
    for name in missing:  # buffers that state dicts do not have
        values.names.pop(name)
    materialize_from_rank0(
        model, values, runtime, parameters_on=torch.device("cpu") if on_cpu else runtime.device
    )
