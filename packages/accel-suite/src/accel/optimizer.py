"""The optimizer that `prepare` returns.

Written by tools/gen_exports.py from api.toml and aliases.toml; change it there.
"""

# fmt: off
from __future__ import annotations

from typing import TYPE_CHECKING

from accel_state._lazy import attach

if TYPE_CHECKING:
    from accel_train.optimizer import AcceleratedOptimizer, move_to_device, patch_optimizer_step

__all__ = ["AcceleratedOptimizer", "move_to_device", "patch_optimizer_step"]

_EXPORTS = {
    **dict.fromkeys((
        "AcceleratedOptimizer", "move_to_device", "patch_optimizer_step",
    ), "accel_train.optimizer"),
}
__getattr__, __dir__ = attach(__name__, _EXPORTS)
