"""Training: `Accelerator`, its data loaders, optimizer and scheduler wrappers. This is the export table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel_state._lazy import attach

if TYPE_CHECKING:
    from accel_train.accelerator import Accelerator as Accelerator
    from accel_train.optimizer import AcceleratedOptimizer as AcceleratedOptimizer
    from accel_train.optimizer import move_to_device as move_to_device
    from accel_train.scheduler import AcceleratedScheduler as AcceleratedScheduler

__all__ = ["AcceleratedOptimizer", "AcceleratedScheduler", "Accelerator", "move_to_device"]

_MODULES = {
    "accelerator": ("Accelerator",),
    "optimizer": ("AcceleratedOptimizer", "move_to_device"),
    "scheduler": ("AcceleratedScheduler",),
}

__getattr__, __dir__ = attach(
    __name__, {name: f"{__name__}.{module}" for module, names in _MODULES.items() for name in names}
)
