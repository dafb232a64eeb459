"""Linear layers that can multiply in 8 bits, and weights of a type of their own in plain state dicts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from accel_ops.dtensors import is_dtensor

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor, nn


def plain_tensor(tensor: Tensor) -> Tensor:
    """Return the values of a tensor, or of a `DTensor`'s shard, without the type that a library put around.

    Example:
        >>> import torch
        >>> plain_tensor(one := torch.ones(1)) is one
        True
    """
    detached: Any = tensor.detach()
    if is_dtensor(detached):
        local = detached.to_local()
        plain = plain_tensor(local)
        if plain is local:
            return tensor
        return type(detached)(plain, detached._spec, requires_grad=False)  # pyright: ignore[reportCallIssue, reportPrivateUsage] - as FSDP does
    if not is_traceable_wrapper_subclass(detached):
        return tensor
    return getattr(detached, detached.__tensor_flatten__()[0][0])


def save_plain_weights(model: nn.Module, names: Iterable[str]) -> None:
    """Let state dicts of a model have plain weights, and weights that are loaded get new scales."""
    for name in names:
        layer = model.get_submodule(name)
        layer.register_state_dict_post_hook(_plain_weight)
        layer.register_load_state_dict_post_hook(_clear_scale)


def tied_layers(model: nn.Module) -> set[str]:
    """Return the names of the layers that share a parameter with another one."""
    owners: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(name.rpartition(".")[0])
    return {name for names in owners.values() if len(names) > 1 for name in names}


def _plain_weight(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    del metadata
    for name, _ in module.named_parameters(recurse=False):
        if prefix + name in state:
            state[prefix + name] = plain_tensor(state[prefix + name])


def _clear_scale(module: nn.Module, incompatible: Any) -> None:
    """Drop a scale that was computed of other values."""
    del incompatible
    weight: Any = module.weight
    local: Any = weight._local_tensor if is_dtensor(weight) else weight  # pyright: ignore[reportPrivateUsage] - `to_local` gives another object
    if hasattr(local, "_precomputed_scale"):
        local._precomputed_scale = None


def is_divisible(layer: Any, divisor: int = 16) -> bool:
    """Return whether both sizes of a linear layer, of torch or a library, are divisible by a number."""
    return layer.in_features % divisor == 0 and layer.out_features % divisor == 0
