"""State that heals a rank: shards of models and optimizers of the same rank in another group."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from accel_ops.tree import local_part

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from accel_plugins.strategy import StateDict


class Shard(NamedTuple):
    """A rank's shard of a `DTensor`, from which another mesh of the same shape rebuilds it.

    Args:
        local: This rank's tensor.
        placements: How the full tensor is sharded.
        shape: Shape of the full tensor.
        stride: Stride of the full tensor.
    """

    local: Tensor
    placements: tuple[Any, ...]
    shape: tuple[int, ...]
    stride: tuple[int, ...]


def as_shards(state: Any) -> Any:
    """Replace the `DTensor`s in a state with shards that can be sent.

    Args:
        state: Dictionaries and lists, nested, of tensors and anything else.
    """
    if isinstance(state, DTensor):
        tensor: Any = state.detach()
        return Shard(local_part(tensor), tensor.placements, tuple(tensor.shape), tensor.stride())
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
        value = state[name]
        local_part(tensor.detach()).copy_(value.local if isinstance(value, Shard) else value)


def load_optimizer(optimizer: Optimizer, state: StateDict) -> None:
    """Load another rank's state, a result of `as_shards`, into an optimizer of sharded parameters."""
    saved = chain.from_iterable(group["params"] for group in state["param_groups"])
    current = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    parameters = dict(zip(saved, current, strict=True))
    values = {
        index: {key: _on_mesh_of(value, parameters[index]) for key, value in own.items()}
        for index, own in state["state"].items()
    }
    optimizer.load_state_dict({**state, "state": values})


def _on_mesh_of(value: Any, parameter: Any) -> Any:
    if not isinstance(value, Shard):
        return value
    return DTensor.from_local(
        value.local.to(parameter.device),
        parameter.device_mesh,
        value.placements,
        run_check=False,
        shape=torch.Size(value.shape),
        stride=value.stride,
    )
