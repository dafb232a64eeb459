"""Keeping less of a forward pass: activation checkpointing of single modules, in place."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from types import MethodType
from typing import TYPE_CHECKING, Any

from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from torch import nn


def checkpoint_activations(module: nn.Module, *, recompute: bool = True, offload: bool = False) -> None:
    """Let a module keep only its inputs for the backward pass; names and classes stay as they are.

    Args:
        module: Changed in place; once is enough, a second time does nothing.
        recompute: Whether what is between inputs and outputs is computed again.
        offload: Whether what is kept goes to the CPU, where there is another device.

    Example:
        >>> import torch
        >>> module = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Tanh())
        >>> checkpoint_activations(module)
        >>> module(torch.ones(1, 1)).shape
        torch.Size([1, 1])
    """
    if "_checkpointed_forward" in vars(module):
        return
    forward = module.forward
    vars(module)["_checkpointed_forward"] = forward

    def checkpointed(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        del self
        call = partial(checkpoint, forward, use_reentrant=False) if recompute else forward
        with save_on_cpu(pin_memory=False) if offload else nullcontext():
            return call(*args, **kwargs)

    checkpointed.__name__ = "forward"
    vars(module)["forward"] = MethodType(checkpointed, module)
