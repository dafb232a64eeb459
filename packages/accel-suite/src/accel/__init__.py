"""One training script, unchanged, on any number of devices.

Written by tools/gen_exports.py from api.toml; change it there.
"""

# fmt: off
from __future__ import annotations

from typing import TYPE_CHECKING

from accel_state._lazy import attach

if TYPE_CHECKING:
    from accel import errors as errors
    from accel import optimizer as optimizer
    from accel import scheduler as scheduler
    from accel import utils as utils
    from accel_plugins.kwargs.amp import AutocastKwargs, GradScalerKwargs
    from accel_plugins.kwargs.dataloader import DataLoaderConfiguration
    from accel_plugins.kwargs.ddp import DistributedDataParallelKwargs
    from accel_plugins.kwargs.process_group import InitProcessGroupKwargs
    from accel_plugins.kwargs.profile import ProfileKwargs
    from accel_state.labels import DDPCommunicationHookType, DistributedType

__all__ = [
    "AutocastKwargs", "DDPCommunicationHookType", "DataLoaderConfiguration",
    "DistributedDataParallelKwargs", "DistributedType", "GradScalerKwargs", "InitProcessGroupKwargs",
    "ProfileKwargs",
]

__version__ = "0.1.0"

_EXPORTS = {
    "errors": "accel.errors:",
    "optimizer": "accel.optimizer:",
    "scheduler": "accel.scheduler:",
    "utils": "accel.utils:",
    **dict.fromkeys(("AutocastKwargs", "GradScalerKwargs"), "accel_plugins.kwargs.amp"),
    **dict.fromkeys(("DataLoaderConfiguration",), "accel_plugins.kwargs.dataloader"),
    **dict.fromkeys(("DistributedDataParallelKwargs",), "accel_plugins.kwargs.ddp"),
    **dict.fromkeys(("InitProcessGroupKwargs",), "accel_plugins.kwargs.process_group"),
    **dict.fromkeys(("ProfileKwargs",), "accel_plugins.kwargs.profile"),
    **dict.fromkeys(("DDPCommunicationHookType", "DistributedType"), "accel_state.labels"),
}
__getattr__, __dir__ = attach(__name__, _EXPORTS)
