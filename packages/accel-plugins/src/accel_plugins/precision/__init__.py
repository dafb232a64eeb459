"""Precision policies: in which number formats models compute."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel_state._lazy import attach

if TYPE_CHECKING:
    from accel_plugins.precision.build import build_precision as build_precision
    from accel_plugins.precision.scaling import stepping_with as stepping_with

__all__ = ["build_precision", "stepping_with"]

__getattr__, __dir__ = attach(
    __name__,
    {
        "build_precision": "accel_plugins.precision.build",
        "stepping_with": "accel_plugins.precision.scaling",
    },
)
