"""Checkpoints: complete or absent, verified, and written in the background."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel_state._lazy import attach

if TYPE_CHECKING:
    from accel_train.checkpoint import load as load
    from accel_train.checkpoint import offloaded as offloaded
    from accel_train.checkpoint import save as save

# Imported by the first use: a fifth of the time of `from accel import Accelerator`.
__getattr__, __dir__ = attach(
    __name__,
    {
        "load": "accel_train.checkpoint.load:",
        "offloaded": "accel_train.checkpoint.offloaded:",
        "save": "accel_train.checkpoint.save:",
    },
)
