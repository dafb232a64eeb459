"""Keeping less of a forward pass: activation checkpointing of single modules, in place."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial, wraps
from types import MethodType
from typing import TYPE_CHECKING, Any

from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from accel_ops.modules import unbound_forward

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn


def checkpoint_activations(module: nn.Module, *, recompute: bool = True, offload: bool = False) -> None:
    """Let a module keep only its inputs for the backward pass; names and classes stay as they are.

    Args:
        module: Changed in place; once is enough, a second time does nothing.
        recompute: Whether what is between inputs and outputs is computed again.
        offload: Whether what is kept goes to the CPU, to pinned memory where there is an accelerator.

    Example:
        >>> import torch
        >>> module = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Tanh())
        >>> checkpoint_activations(module)
        >>> module(torch.ones(1, 1)).shape
        torch.Size([1, 1])
    """
    if "_checkpointed_forward" in vars(module):
        return
    vars(module)["_checkpointed_forward"] = module.forward
    forward = unbound_forward(module)

    @wraps(forward)
    def checkpointed(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        call: Callable[..., Any] = partial(forward, self)
        if recompute:
            call = partial(checkpoint, call, use_reentrant=False)
        with save_on_cpu(pin_memory=True) if offload else nullcontext():  # pins where there is an accelerator
            return call(*args, **kwargs)

    checkpointed.__name__ = "forward"  # a method is pickled by its name
    vars(module)["forward"] = MethodType(checkpointed, module)
