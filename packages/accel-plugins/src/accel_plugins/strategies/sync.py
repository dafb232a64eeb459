"""All-reduce gradients in a backward pass whose forward pass ran in `no_sync`."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch.nn.parallel import DistributedDataParallel

from accel_ops.modules import without_compiler
from accel_state.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Generator

    from torch import nn


@contextmanager
def sync_in_backward(model: nn.Module) -> Generator[None]:
    """Synchronise gradients in the backward pass within, although the forward pass ran in `no_sync`."""
    inner = without_compiler(model)
    if isinstance(inner, DistributedDataParallel):
        with _of_ddp(inner):
            yield
    elif _is_sharded(inner):
        sharded: Any = inner
        sharded.set_requires_gradient_sync(True)
        yield
    else:
        yield


def _is_sharded(model: nn.Module) -> bool:
    fsdp = sys.modules.get("torch.distributed.fsdp")  # a sharded model has imported it
    return fsdp is not None and isinstance(model, fsdp.FSDPModule)


@contextmanager
def _of_ddp(inner: DistributedDataParallel) -> Generator[None]:
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
