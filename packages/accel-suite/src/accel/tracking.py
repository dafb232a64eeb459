"""Experiment trackers.

Written by tools/gen_exports.py from api.toml and aliases.toml; change it there.
"""

# fmt: off
from __future__ import annotations

from typing import TYPE_CHECKING

from accel_state._lazy import attach

if TYPE_CHECKING:
    from accel_trackers.general import GeneralTracker, on_main_process
    from accel_trackers.libraries.aim import AimTracker
    from accel_trackers.libraries.clearml import ClearMLTracker
    from accel_trackers.libraries.comet import CometMLTracker
    from accel_trackers.libraries.dvclive import DVCLiveTracker
    from accel_trackers.libraries.mlflow import MLflowTracker
    from accel_trackers.libraries.swanlab import SwanLabTracker
    from accel_trackers.libraries.tensorboard import TensorBoardTracker
    from accel_trackers.libraries.trackio import TrackioTracker
    from accel_trackers.libraries.wandb import WandBTracker
    from accel_trackers.registry import (
        LOGGER_TYPE_TO_CLASS, filter_trackers, get_available_trackers, register_tracker_class,
    )

__all__ = [
    "AimTracker", "ClearMLTracker", "CometMLTracker", "DVCLiveTracker", "GeneralTracker",
    "LOGGER_TYPE_TO_CLASS", "MLflowTracker", "SwanLabTracker", "TensorBoardTracker", "TrackioTracker",
    "WandBTracker", "filter_trackers", "get_available_trackers", "on_main_process",
    "register_tracker_class",
]

_EXPORTS = {
    **dict.fromkeys(("GeneralTracker", "on_main_process"), "accel_trackers.general"),
    **dict.fromkeys(("AimTracker",), "accel_trackers.libraries.aim"),
    **dict.fromkeys(("ClearMLTracker",), "accel_trackers.libraries.clearml"),
    **dict.fromkeys(("CometMLTracker",), "accel_trackers.libraries.comet"),
    **dict.fromkeys(("DVCLiveTracker",), "accel_trackers.libraries.dvclive"),
    **dict.fromkeys(("MLflowTracker",), "accel_trackers.libraries.mlflow"),
    **dict.fromkeys(("SwanLabTracker",), "accel_trackers.libraries.swanlab"),
    **dict.fromkeys(("TensorBoardTracker",), "accel_trackers.libraries.tensorboard"),
    **dict.fromkeys(("TrackioTracker",), "accel_trackers.libraries.trackio"),
    **dict.fromkeys(("WandBTracker",), "accel_trackers.libraries.wandb"),
    **dict.fromkeys((
        "LOGGER_TYPE_TO_CLASS", "filter_trackers", "get_available_trackers", "register_tracker_class",
    ), "accel_trackers.registry"),
}
__getattr__, __dir__ = attach(__name__, _EXPORTS)
