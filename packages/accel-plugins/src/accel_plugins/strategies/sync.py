"""Bringing gradients together in a backward pass whose forward pass ran without that."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch.nn.parallel import DistributedDataParallel

from accel_ops.modules import without_compiler
from accel_state.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Generator

    from torch import nn


@contextmanager
def sync_in_backward(model: nn.Module) -> Generator[None]:
    """Let the backward pass within synchronise, although the forward pass ran in `no_sync`.

    Args:
        model: The model; only `DistributedDataParallel` has anything to be told.

    Raises:
        UnsupportedError: It looks for unused parameters, which it does in the forward pass.
    """
    inner = without_compiler(model)
    if not isinstance(inner, DistributedDataParallel):
        yield
        return
    if inner.find_unused_parameters:
        raise UnsupportedError(
            "trigger_sync_in_backward() with find_unused_parameters=True: which parameters are unused is "
            "found out in a forward pass that synchronises; leave the option out, or run the last forward "
            "pass outside of no_sync()."
        )
    before = inner.require_backward_grad_sync, inner.require_forward_param_sync
    inner.require_backward_grad_sync = inner.require_forward_param_sync = True
    # What the forward pass would have done: https://docs.pytorch.org/docs/stable/notes/ddp.html
    inner.reducer.prepare_for_backward([])
    try:
        yield
    finally:
        inner.require_backward_grad_sync, inner.require_forward_param_sync = before
