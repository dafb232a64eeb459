"""Typed settings of a run, from arguments, environment variables and config files. Torch-free."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel_state._lazy import attach

if TYPE_CHECKING:
    from accel_state.settings.engines import DeepSpeedSettings as DeepSpeedSettings
    from accel_state.settings.engines import Fp8Settings as Fp8Settings
    from accel_state.settings.engines import FsdpSettings as FsdpSettings
    from accel_state.settings.engines import MegatronSettings as MegatronSettings
    from accel_state.settings.engines import ParallelismSettings as ParallelismSettings
    from accel_state.settings.environ import from_environ as from_environ
    from accel_state.settings.environ import parse_environ as parse_environ
    from accel_state.settings.environ import to_environ as to_environ
    from accel_state.settings.environ import worker_environ as worker_environ
    from accel_state.settings.error_collector import ErrorCollector as ErrorCollector
    from accel_state.settings.file import default_config_file as default_config_file
    from accel_state.settings.file import parse_file as parse_file
    from accel_state.settings.file import to_content as to_content
    from accel_state.settings.merge import Layer as Layer
    from accel_state.settings.merge import Merged as Merged
    from accel_state.settings.merge import SourcedValue as SourcedValue
    from accel_state.settings.merge import combine as combine
    from accel_state.settings.merge import merge_sources as merge_sources
    from accel_state.settings.model import DynamoSettings as DynamoSettings
    from accel_state.settings.model import LaunchSettings as LaunchSettings
    from accel_state.settings.model import PrecisionSettings as PrecisionSettings
    from accel_state.settings.model import ProcessSettings as ProcessSettings
    from accel_state.settings.model import Settings as Settings
    from accel_state.settings.model import TrainingSettings as TrainingSettings
    from accel_state.settings.option import Option as Option
    from accel_state.settings.options import OPTIONS as OPTIONS
    from accel_state.settings.remote import HostSettings as HostSettings
    from accel_state.settings.remote import MpiSettings as MpiSettings
    from accel_state.settings.remote import SageMakerSettings as SageMakerSettings
    from accel_state.settings.remote import TpuSettings as TpuSettings

__all__ = [
    "OPTIONS",
    "DeepSpeedSettings",
    "DynamoSettings",
    "ErrorCollector",
    "Fp8Settings",
    "FsdpSettings",
    "HostSettings",
    "LaunchSettings",
    "Layer",
    "MegatronSettings",
    "Merged",
    "MpiSettings",
    "Option",
    "ParallelismSettings",
    "PrecisionSettings",
    "ProcessSettings",
    "SageMakerSettings",
    "Settings",
    "SourcedValue",
    "TpuSettings",
    "TrainingSettings",
    "combine",
    "default_config_file",
    "from_environ",
    "merge_sources",
    "parse_environ",
    "parse_file",
    "to_content",
    "to_environ",
    "worker_environ",
]

_MODULES = {
    "engines": (
        "DeepSpeedSettings",
        "Fp8Settings",
        "FsdpSettings",
        "MegatronSettings",
        "ParallelismSettings",
    ),
    "environ": ("from_environ", "parse_environ", "to_environ", "worker_environ"),
    "file": ("default_config_file", "parse_file", "to_content"),
    "merge": ("SourcedValue", "Layer", "Merged", "combine", "merge_sources"),
    "model": (
        "DynamoSettings",
        "LaunchSettings",
        "PrecisionSettings",
        "ProcessSettings",
        "Settings",
        "TrainingSettings",
    ),
    "option": ("Option",),
    "options": ("OPTIONS",),
    "remote": ("HostSettings", "MpiSettings", "SageMakerSettings", "TpuSettings"),
    "error_collector": ("ErrorCollector",),
}

__getattr__, __dir__ = attach(
    __name__, {name: f"{__name__}.{module}" for module, names in _MODULES.items() for name in names}
)
