"""Recompute of modules whose inputs megatron-core's own recompute does not carry, as relative positions."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.checkpoint import checkpoint

from accel_plugins.megatron.library import core

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable

    from torch import nn


def recompute(modules: Iterable[nn.Module]) -> None:
    """Let modules recompute their activations in the backward pass.

    Args:
        modules: What they call is drawn from the random states of tensor parallelism or the default ones.
    """
    for module in modules:
        module.forward = partial(_recomputed, module.forward)


def _recomputed(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    tracker = core("tensor_parallel").get_cuda_rng_tracker()
    before = tracker.get_states()

    @contextmanager
    def as_before() -> Generator[None]:
        now = tracker.get_states()
        tracker.set_states(before)
        try:
            yield
        finally:
            tracker.set_states(now)

    def contexts() -> Any:
        return nullcontext(), as_before()

    return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)
