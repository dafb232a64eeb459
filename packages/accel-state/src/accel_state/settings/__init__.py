"""Typed settings: what a run was asked to do, wherever that was said. Torch-free."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel_state._lazy import attach

if TYPE_CHECKING:
    from accel_state.settings.environ import from_environ as from_environ
    from accel_state.settings.environ import given_by_environ as given_by_environ
    from accel_state.settings.environ import to_environ as to_environ
    from accel_state.settings.environ import worker_environ as worker_environ
    from accel_state.settings.file import default_config_file as default_config_file
    from accel_state.settings.file import given_by_file as given_by_file
    from accel_state.settings.merge import Given as Given
    from accel_state.settings.merge import Layer as Layer
    from accel_state.settings.merge import Merged as Merged
    from accel_state.settings.merge import combine as combine
    from accel_state.settings.model import DynamoSettings as DynamoSettings
    from accel_state.settings.model import LaunchSettings as LaunchSettings
    from accel_state.settings.model import PrecisionSettings as PrecisionSettings
    from accel_state.settings.model import ProcessSettings as ProcessSettings
    from accel_state.settings.model import Settings as Settings
    from accel_state.settings.model import TrainingSettings as TrainingSettings
    from accel_state.settings.options import OPTIONS as OPTIONS
    from accel_state.settings.options import Option as Option

__all__ = [
    "OPTIONS",
    "DynamoSettings",
    "Given",
    "LaunchSettings",
    "Layer",
    "Merged",
    "Option",
    "PrecisionSettings",
    "ProcessSettings",
    "Settings",
    "TrainingSettings",
    "combine",
    "default_config_file",
    "from_environ",
    "given_by_environ",
    "given_by_file",
    "to_environ",
    "worker_environ",
]

_MODULES = {
    "environ": ("from_environ", "given_by_environ", "to_environ", "worker_environ"),
    "file": ("default_config_file", "given_by_file"),
    "merge": ("Given", "Layer", "Merged", "combine"),
    "model": (
        "DynamoSettings",
        "LaunchSettings",
        "PrecisionSettings",
        "ProcessSettings",
        "Settings",
        "TrainingSettings",
    ),
    "options": ("OPTIONS", "Option"),
}

__getattr__, __dir__ = attach(
    __name__, {name: f"{__name__}.{module}" for module, names in _MODULES.items() for name in names}
)
