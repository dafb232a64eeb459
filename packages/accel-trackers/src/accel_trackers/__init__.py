"""Experiment trackers behind one interface."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel_state._lazy import attach

if TYPE_CHECKING:
    from accel_trackers.general import GeneralTracker as GeneralTracker
    from accel_trackers.general import on_main_process as on_main_process
    from accel_trackers.registry import LOGGER_TYPE_TO_CLASS as LOGGER_TYPE_TO_CLASS
    from accel_trackers.registry import filter_trackers as filter_trackers
    from accel_trackers.registry import get_available_trackers as get_available_trackers
    from accel_trackers.registry import register_tracker_class as register_tracker_class
    from accel_trackers.registry import tracker_class as tracker_class
    from accel_trackers.session import TrackerSession as TrackerSession

__all__ = [
    "LOGGER_TYPE_TO_CLASS",
    "GeneralTracker",
    "TrackerSession",
    "filter_trackers",
    "get_available_trackers",
    "on_main_process",
    "register_tracker_class",
    "tracker_class",
]

__getattr__, __dir__ = attach(
    __name__,
    {
        "LOGGER_TYPE_TO_CLASS": "accel_trackers.registry",
        "GeneralTracker": "accel_trackers.general",
        "TrackerSession": "accel_trackers.session",
        "filter_trackers": "accel_trackers.registry",
        "get_available_trackers": "accel_trackers.registry",
        "on_main_process": "accel_trackers.general",
        "register_tracker_class": "accel_trackers.registry",
        "tracker_class": "accel_trackers.registry",
    },
)
