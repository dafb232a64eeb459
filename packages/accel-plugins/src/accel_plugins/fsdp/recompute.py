"""Activation checkpointing, by torch or the library of a block's layers, and offloading, in place."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial, wraps
from importlib import import_module
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from accel_ops.modules import unbound_forward
from accel_state.errors import UnsupportedError
from accel_state.versions import compare_versions

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

_LIBRARY = "transformer_engine"

FIRST_VERSION = "2.2"
"""Of TransformerEngine: earlier ones recompute outside of its autocast, and so in another precision."""


def checkpoint_function(module: nn.Module) -> Callable[..., Any]:
    """Return the function that calls another one with its arguments and recomputes its activations later.

    Layers of TransformerEngine have to be recomputed within its autocast and with the scales of the forward
    pass, which `transformer_engine.pytorch.checkpoint` sees to.

    Example:
        >>> layer = torch.nn.Linear(1, 1)
        >>> checkpoint_function(layer)(layer, torch.ones(1, 1)).shape
        torch.Size([1, 1])
    """
    if not has_te_modules(module):
        return partial(checkpoint, use_reentrant=False)
    if compare_versions("transformer-engine", "<", FIRST_VERSION):
        raise UnsupportedError(
            "FullyShardedDataParallelPlugin(activation_checkpointing=True): TransformerEngine "
            f"{FIRST_VERSION} or newer is needed to recompute its layers in FP8; upgrade it, or use the FP8 "
            "backend 'AO'."
        )
    return _checkpoint_in_fp8


def has_te_modules(module: nn.Module) -> bool:
    """Whether there are layers of TransformerEngine in a module; the library is not imported."""
    classes = {kind for part in module.modules() for kind in type(part).__mro__}
    return any(kind.__module__.partition(".")[0] == _LIBRARY for kind in classes)


def _checkpoint_in_fp8(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():  # versions before 2.20 would keep its scales for a backward pass
        return function(*args, **kwargs)
    library = import_module(f"{_LIBRARY}.pytorch")
    return library.checkpoint(function, *args, use_reentrant=False, **kwargs)


def checkpoint_activations(module: nn.Module, *, recompute: bool = True, offload: bool = False) -> None:
    """Apply activation checkpointing to a module in place, without renaming or replacing modules.

    Its forward is replaced; a second call does nothing. `offload` moves saved tensors to the CPU, into pinned
    memory if there is an accelerator.

    Example:
        >>> import torch
        >>> module = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Tanh())
        >>> checkpoint_activations(module)
        >>> module(torch.ones(1, 1)).shape
        torch.Size([1, 1])
    """
    if "_checkpointed_forward" in vars(module):
        return
    again = checkpoint_function(module) if recompute else None
    vars(module)["_checkpointed_forward"] = module.forward
    forward = unbound_forward(module)

    @wraps(forward)
    def checkpointed(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        call: Callable[..., Any] = partial(forward, self)
        if again is not None:
            call = partial(again, call)
        with (
            save_on_cpu(pin_memory=True) if offload else nullcontext()
        ):  # pinned only if there is an accelerator
            return call(*args, **kwargs)

    checkpointed.__name__ = "forward"  # a method is pickled by its name
    vars(module)["forward"] = MethodType(checkpointed, module)
