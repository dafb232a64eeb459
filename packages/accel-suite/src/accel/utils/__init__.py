"""The building blocks: nested data, settings, RNG, availability, plugin dataclasses.

Written by tools/gen_exports.py from api.toml; change it there.
"""

# fmt: off
from __future__ import annotations

from typing import TYPE_CHECKING

from accel_state._lazy import attach

if TYPE_CHECKING:
    from accel.utils import environment as environment
    from accel_plugins.kwargs.accumulation import GradientAccumulationPlugin
    from accel_plugins.kwargs.amp import AutocastKwargs, GradScalerKwargs
    from accel_plugins.kwargs.base import KwargsHandler
    from accel_plugins.kwargs.dataloader import DataLoaderConfiguration
    from accel_plugins.kwargs.ddp import DistributedDataParallelKwargs
    from accel_plugins.kwargs.dynamo import TorchDynamoPlugin
    from accel_plugins.kwargs.process_group import InitProcessGroupKwargs
    from accel_plugins.kwargs.profile import ProfileKwargs
    from accel_plugins.kwargs.project import ProjectConfiguration
    from accel_state.environ import (
        are_libraries_initialized, clear_environment, convert_dict_to_env_variables, get_int_from_env,
        parse_choice_from_env, parse_flag_from_env, patch_environment, purge_accelerate_environment,
        str_to_bool,
    )
    from accel_state.labels import (
        ComputeEnvironment, CustomDtype, DDPCommunicationHookType, DistributedType, DynamoBackend,
        LoggerType, PrecisionType, RNGType, SageMakerDistributedType,
    )
    from accel_state.topology import get_cpu_distributed_information

__all__ = [
    "AutocastKwargs", "ComputeEnvironment", "CustomDtype", "DDPCommunicationHookType",
    "DataLoaderConfiguration", "DistributedDataParallelKwargs", "DistributedType", "DynamoBackend",
    "GradScalerKwargs", "GradientAccumulationPlugin", "InitProcessGroupKwargs", "KwargsHandler",
    "LoggerType", "PrecisionType", "ProfileKwargs", "ProjectConfiguration", "RNGType",
    "SageMakerDistributedType", "TorchDynamoPlugin", "are_libraries_initialized", "clear_environment",
    "convert_dict_to_env_variables", "get_cpu_distributed_information", "get_int_from_env",
    "parse_choice_from_env", "parse_flag_from_env", "patch_environment", "purge_accelerate_environment",
    "str_to_bool",
]

_EXPORTS = {
    "environment": "accel.utils.environment:",
    **dict.fromkeys(("GradientAccumulationPlugin",), "accel_plugins.kwargs.accumulation"),
    **dict.fromkeys(("AutocastKwargs", "GradScalerKwargs"), "accel_plugins.kwargs.amp"),
    **dict.fromkeys(("KwargsHandler",), "accel_plugins.kwargs.base"),
    **dict.fromkeys(("DataLoaderConfiguration",), "accel_plugins.kwargs.dataloader"),
    **dict.fromkeys(("DistributedDataParallelKwargs",), "accel_plugins.kwargs.ddp"),
    **dict.fromkeys(("TorchDynamoPlugin",), "accel_plugins.kwargs.dynamo"),
    **dict.fromkeys(("InitProcessGroupKwargs",), "accel_plugins.kwargs.process_group"),
    **dict.fromkeys(("ProfileKwargs",), "accel_plugins.kwargs.profile"),
    **dict.fromkeys(("ProjectConfiguration",), "accel_plugins.kwargs.project"),
    **dict.fromkeys((
        "are_libraries_initialized", "clear_environment", "convert_dict_to_env_variables",
        "get_int_from_env", "parse_choice_from_env", "parse_flag_from_env", "patch_environment",
        "purge_accelerate_environment", "str_to_bool",
    ), "accel_state.environ"),
    **dict.fromkeys((
        "ComputeEnvironment", "CustomDtype", "DDPCommunicationHookType", "DistributedType", "DynamoBackend",
        "LoggerType", "PrecisionType", "RNGType", "SageMakerDistributedType",
    ), "accel_state.labels"),
    **dict.fromkeys(("get_cpu_distributed_information",), "accel_state.topology"),
}
__getattr__, __dir__ = attach(__name__, _EXPORTS)
