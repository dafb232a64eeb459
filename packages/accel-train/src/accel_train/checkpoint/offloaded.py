"""State dicts of models whose weights are offloaded: hooks keep them, and the model has meta tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from accel_ops.modules import extract_model_from_parallel
from accel_state.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import nn


def get_state_dict_offloaded_model(model: nn.Module) -> dict[str, Any]:
    """Return the state dict of a model, offloaded weights included; those on the disk are mapped.

    Args:
        model: A model with the hooks of `cpu_offload`, `disk_offload` or `dispatch_model`, or without any.

    Raises:
        CheckpointError: A tensor is on the meta device, and no hook keeps its values.
    """
    return with_offloaded_weights(model.state_dict(), model)


def with_offloaded_weights(state: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    """Replace meta tensors by the offloaded weights, as `get_state_dict_offloaded_model`."""
    core = extract_model_from_parallel(model, keep_torch_compile=False)
    return {
        name: _offloaded(core, name) if isinstance(value, Tensor) and value.is_meta else value
        for name, value in state.items()
    }


def _offloaded(model: nn.Module, name: str) -> Tensor:
    module, rest = model, name
    while True:
        for weights in _weights_of(module):
            try:
                return weights[rest].detach()
            except KeyError:
                continue
        child, _, rest = rest.partition(".")
        if not rest:
            raise CheckpointError(
                f"{name!r} of {type(model).__name__} is on the meta device, and no hook keeps its values: "
                "load weights before you save the model."
            )
        module = module.get_submodule(child)


def _weights_of(module: nn.Module) -> Iterator[Mapping[str, Tensor]]:
    hook: Any = vars(module).get("_hf_hook")  # the name that all libraries use
    for one in getattr(hook, "hooks", (hook,)):
        weights = getattr(one, "weights_map", None)
        if weights is not None:
            yield weights
