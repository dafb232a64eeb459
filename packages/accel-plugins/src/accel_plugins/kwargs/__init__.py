"""Documented dataclasses of options of PyTorch and accel."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel_state._lazy import attach

if TYPE_CHECKING:
    from accel_plugins.kwargs import comm_hooks as comm_hooks

# Imported by the first use: torch's communication hooks take 0.05 s.
__getattr__, __dir__ = attach(
    __name__,
    {
        "comm_hooks": "accel_plugins.kwargs.comm_hooks:",
    },
)
