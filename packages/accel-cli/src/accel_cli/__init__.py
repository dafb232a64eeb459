"""The `accel` command: start and inspect PyTorch programs on any number of devices."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel_state._lazy import attach

if TYPE_CHECKING:
    from accel_cli.main import main as main

__all__ = ["main"]

__getattr__, __dir__ = attach(__name__, {"main": "accel_cli.main"})
