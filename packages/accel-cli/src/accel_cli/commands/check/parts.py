"""Run an optimizer on local shards instead of DTensors, which takes a fraction of the time."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from accel_ops.dtensors import local_part
from accel_plugins.fp8.weights import plain_tensor

if TYPE_CHECKING:
    from collections.abc import Generator

    from torch.optim import Optimizer

ELEMENTWISE = frozenset(
    {
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adamax,
        torch.optim.Adagrad,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.SGD,
    }
)
"""Optimizers that change every element by itself, so that a part is changed as the whole is."""


@contextlib.contextmanager
def on_parts(optimizer: Optimizer) -> Generator[None]:
    """Replace the parameters of an `ELEMENTWISE` optimizer by this rank's local shards within the block.

    `DTensor` propagates the sharding of each result, which takes most of a step of many tensors. Afterwards
    the state is as if the optimizer had updated the DTensors.
    """
    if type(optimizer) not in ELEMENTWISE:
        yield
        return
    full = [[*group["params"]] for group in optimizer.param_groups]
    parts = [[_part(one) for one in group] for group in full]
    pairs = [pair for own, theirs in zip(parts, full, strict=True) for pair in zip(own, theirs, strict=True)]
    state: Any = optimizer.state
    _put(optimizer, parts)
    for part, one in pairs:
        if part is not one and one in state:
            state[part] = {name: _local(value) for name, value in state.pop(one).items()}
    try:
        yield
    finally:
        _put(optimizer, full)
        for part, one in pairs:
            if part is not one and part in state:
                state[one] = {name: _like(value, one) for name, value in state.pop(part).items()}


def _put(optimizer: Optimizer, params: list[list[Any]]) -> None:
    for group, own in zip(optimizer.param_groups, params, strict=True):
        group["params"] = own


def _part(parameter: Any) -> Any:
    if not isinstance(parameter, DTensor):
        return parameter
    part: Any = _local(parameter).detach()
    part.grad = None if parameter.grad is None else _local(parameter.grad)
    return part


def _local(value: Any) -> Any:
    return plain_tensor(local_part(value)) if isinstance(value, Tensor) else value


def _like(value: Any, full: Any) -> Any:
    """Return the DTensor of a local tensor, if its shape is that of a parameter's shard."""
    if not isinstance(value, Tensor) or value.shape != local_part(full).shape:
        return value
    meta = TensorMeta(full.shape, full.stride(), value.dtype)
    spec = DTensorSpec(full.device_mesh, full.placements, tensor_meta=meta)
    return DTensor(value, spec, requires_grad=False)  # pyright: ignore[reportCallIssue] - as in `shard_like`
