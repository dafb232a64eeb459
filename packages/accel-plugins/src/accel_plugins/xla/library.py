"""Import torch_xla; of this package no other module does."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from accel_state.devices.xla import library


def xla_module(name: str) -> Any:
    """Import a submodule of torch_xla.

    Raises:
        MissingDependencyError: torch_xla is not the version that belongs to that of torch.
    """
    library()
    return import_module(f"torch_xla.{name}")
