"""Activation checkpointing and offloading of single modules, in place."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial, wraps
from types import MethodType
from typing import TYPE_CHECKING, Any

from torch.autograd.graph import save_on_cpu

from accel_ops.modules import unbound_forward
from accel_plugins.fsdp.recompute import checkpoint_function

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn


def checkpoint_activations(module: nn.Module, *, recompute: bool = True, offload: bool = False) -> None:
    """Apply activation checkpointing to a module in place, without renaming or replacing modules.

    Args:
        module: The module, whose forward is replaced; a second call does nothing.
        recompute: Whether activations are recomputed in the backward pass.
        offload: Whether saved tensors are offloaded to the CPU, in pinned memory if there is an accelerator.

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
