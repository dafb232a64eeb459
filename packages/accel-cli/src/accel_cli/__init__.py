"""The `accel` command: start and inspect PyTorch programs on any number of devices."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel_state._lazy import attach

if TYPE_CHECKING:
    from accel_cli.main import COMMANDS as COMMANDS
    from accel_cli.main import Command as Command

__all__ = ["COMMANDS", "Command"]

__getattr__, __dir__ = attach(__name__, dict.fromkeys(__all__, "accel_cli.main"))
