"""The libraries behind the trackers: their modules, imported when a tracker is constructed."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from accel_state.available import require

VENDORS = ("aim", "clearml", "comet_ml", "dvclive", "mlflow", "swanlab", "tensorboard", "trackio", "wandb")
"""The names of the trackers, which are those of the libraries in `accel_state.available.LIBRARIES`."""


def require_vendor(name: str, what: str) -> None:
    """Raise if the library of a tracker, which `what` needs, is absent."""
    require(name, what, install=f"accel-trackers[{name.replace('_', '-')}]")


def import_vendor(name: str, module: str | None = None) -> Any:
    """Import a module of a tracker's library, by default the one that has the tracker's name."""
    require_vendor(name, f"The tracker {name!r}")
    return import_module(module or name)
