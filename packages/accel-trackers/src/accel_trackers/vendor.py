"""The libraries behind the trackers: their modules, imported when a tracker is constructed."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from accel_state.available import require

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True, kw_only=True)
class Vendor:
    """The library of a tracker.

    Args:
        module: What is imported.
        installed: Its row in `accel_state.available.LIBRARIES`.
        extra: The extra of this package that brings it.
    """

    module: str
    installed: str
    extra: str


def _vendor(module: str, installed: str | None = None, extra: str | None = None) -> Vendor:
    return Vendor(module=module, installed=installed or module, extra=extra or module)


VENDORS: Mapping[str, Vendor] = {
    "aim": _vendor("aim"),
    "clearml": _vendor("clearml"),
    "comet_ml": _vendor("comet_ml", extra="comet-ml"),
    "dvclive": _vendor("dvclive"),
    "mlflow": _vendor("mlflow"),
    "swanlab": _vendor("swanlab"),
    "tensorboard": _vendor("torch.utils.tensorboard", "tensorboard", "tensorboard"),
    "trackio": _vendor("trackio"),
    "wandb": _vendor("wandb"),
}
"""By the name of the tracker."""


def import_vendor(name: str, module: str | None = None) -> Any:
    """Import the library of a tracker.

    Args:
        name: Of the tracker.
        module: Which of its modules; its main one if `None`.
    """
    vendor = VENDORS[name]
    require(vendor.installed, f"The tracker {name!r}", install=f"accel-trackers[{vendor.extra}]")
    return import_module(module or vendor.module)
