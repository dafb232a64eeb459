"""State that heals a rank: shards of models and optimizers of the same rank in another group."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from accel_ops.tree import local_part
from accel_plugins.sharding.shards import with_local

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from accel_plugins.strategy import StateDict


def as_shards(state: Any) -> Any:
    """Replace the `DTensor`s in a state of nested dictionaries and lists by this rank's local tensors."""
    if isinstance(state, DTensor):
        return local_part(state.detach())
    if isinstance(state, Mapping):
        return {key: as_shards(value) for key, value in state.items()}
    return [as_shards(value) for value in state] if isinstance(state, list) else state


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a model's state dict, sharded as they stay between steps.

    FSDP2 reshards a model when its state dict is built, so do not call this in another thread while the model
    runs.
    """
    state = model.state_dict(keep_vars=True)
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


@torch.no_grad()
def load_tensors(tensors: Mapping[str, Tensor], state: StateDict) -> None:
    """Copy another rank's state, a result of `as_shards`, into tensors of the same names."""
    for name, tensor in tensors.items():
        local_part(tensor.detach()).copy_(state[name])


def load_optimizer(optimizer: Optimizer, state: StateDict) -> None:
    """Load another rank's state, a result of `as_shards`, into an optimizer of sharded parameters."""
    saved = chain.from_iterable(group["params"] for group in state["param_groups"])
    current = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    parameters = dict(zip(saved, current, strict=True))
    values = {
        index: {key: _sharded_like(parameters[index], value) for key, value in own.items()}
        for index, own in state["state"].items()
    }
    optimizer.load_state_dict({**state, "state": values})


def _sharded_like(parameter: Any, value: Any) -> Any:
    """Return a value in the shape of a parameter's shard as a `DTensor` like the parameter."""
    is_shard = isinstance(parameter, DTensor) and isinstance(value, Tensor) and value.dim() > 0
    if not is_shard or value.shape != local_part(parameter).shape:
        return value
    return with_local(parameter, value.to(parameter.device))
