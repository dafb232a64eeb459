"""Sharded models: materialise, optimise and save them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel_state._lazy import attach

if TYPE_CHECKING:
    from accel_plugins.sharding import optimizers as optimizers

# Imported by the first use: torch.distributed.tensor imports sympy, 0.3 s.
__getattr__, __dir__ = attach(
    __name__,
    {
        "optimizers": "accel_plugins.sharding.optimizers:",
    },
)
