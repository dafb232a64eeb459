"""Names under the path by which users of Accelerate import them.

Written by tools/gen_exports.py from api.toml and aliases.toml; change it there.
"""

# fmt: off
from __future__ import annotations

from typing import TYPE_CHECKING

from accel_state._lazy import attach

if TYPE_CHECKING:
    from accel_ops.modules import get_module_class_from_name
    from accel_ops.tree import TensorInformation
    from accel_plugins.deepspeed.plugin import DeepSpeedPlugin
    from accel_plugins.fsdp.plugin import FullyShardedDataParallelPlugin
    from accel_plugins.kwargs.accumulation import GradientAccumulationPlugin
    from accel_plugins.kwargs.amp import AutocastKwargs, GradScalerKwargs
    from accel_plugins.kwargs.base import KwargsHandler
    from accel_plugins.kwargs.dataloader import DataLoaderConfiguration
    from accel_plugins.kwargs.ddp import DistributedDataParallelKwargs
    from accel_plugins.kwargs.dynamo import TorchDynamoPlugin
    from accel_plugins.kwargs.fp8 import (
        AORecipeKwargs, FP8RecipeKwargs, MSAMPRecipeKwargs, TERecipeKwargs,
    )
    from accel_plugins.kwargs.process_group import InitProcessGroupKwargs
    from accel_plugins.kwargs.profile import ProfileKwargs
    from accel_plugins.kwargs.project import ProjectConfiguration
    from accel_plugins.megatron.plugin import MegatronLMPlugin
    from accel_plugins.parallelism.handlers import (
        DeepSpeedSequenceParallelConfig, TorchContextParallelConfig, TorchTensorParallelConfig,
        TorchTensorParallelPlugin,
    )
    from accel_quant.bnb.config import BnbQuantizationConfig
    from accel_state.labels import (
        ComputeEnvironment, CustomDtype, DDPCommunicationHookType, DistributedType, DynamoBackend,
        FP8BackendType, LoggerType, PrecisionType, RNGType, SageMakerDistributedType,
    )
    from accel_state.versions import (
        MITA_PROFILING_AVAILABLE_PYTORCH_VERSION, XPU_PROFILING_AVAILABLE_PYTORCH_VERSION,
    )

__all__ = [
    "AORecipeKwargs", "AutocastKwargs", "BnbQuantizationConfig", "ComputeEnvironment", "CustomDtype",
    "DDPCommunicationHookType", "DataLoaderConfiguration", "DeepSpeedPlugin",
    "DeepSpeedSequenceParallelConfig", "DistributedDataParallelKwargs", "DistributedType", "DynamoBackend",
    "FP8BackendType", "FP8RecipeKwargs", "FullyShardedDataParallelPlugin", "GradScalerKwargs",
    "GradientAccumulationPlugin", "InitProcessGroupKwargs", "KwargsHandler", "LoggerType",
    "MITA_PROFILING_AVAILABLE_PYTORCH_VERSION", "MSAMPRecipeKwargs", "MegatronLMPlugin", "PrecisionType",
    "ProfileKwargs", "ProjectConfiguration", "RNGType", "SageMakerDistributedType", "TERecipeKwargs",
    "TensorInformation", "TorchContextParallelConfig", "TorchDynamoPlugin", "TorchTensorParallelConfig",
    "TorchTensorParallelPlugin", "XPU_PROFILING_AVAILABLE_PYTORCH_VERSION", "get_module_class_from_name",
]

_EXPORTS = {
    **dict.fromkeys(("get_module_class_from_name",), "accel_ops.modules"),
    **dict.fromkeys(("TensorInformation",), "accel_ops.tree"),
    **dict.fromkeys(("DeepSpeedPlugin",), "accel_plugins.deepspeed.plugin"),
    **dict.fromkeys(("FullyShardedDataParallelPlugin",), "accel_plugins.fsdp.plugin"),
    **dict.fromkeys(("GradientAccumulationPlugin",), "accel_plugins.kwargs.accumulation"),
    **dict.fromkeys(("AutocastKwargs", "GradScalerKwargs"), "accel_plugins.kwargs.amp"),
    **dict.fromkeys(("KwargsHandler",), "accel_plugins.kwargs.base"),
    **dict.fromkeys(("DataLoaderConfiguration",), "accel_plugins.kwargs.dataloader"),
    **dict.fromkeys(("DistributedDataParallelKwargs",), "accel_plugins.kwargs.ddp"),
    **dict.fromkeys(("TorchDynamoPlugin",), "accel_plugins.kwargs.dynamo"),
    **dict.fromkeys((
        "AORecipeKwargs", "FP8RecipeKwargs", "MSAMPRecipeKwargs", "TERecipeKwargs",
    ), "accel_plugins.kwargs.fp8"),
    **dict.fromkeys(("InitProcessGroupKwargs",), "accel_plugins.kwargs.process_group"),
    **dict.fromkeys(("ProfileKwargs",), "accel_plugins.kwargs.profile"),
    **dict.fromkeys(("ProjectConfiguration",), "accel_plugins.kwargs.project"),
    **dict.fromkeys(("MegatronLMPlugin",), "accel_plugins.megatron.plugin"),
    **dict.fromkeys((
        "DeepSpeedSequenceParallelConfig", "TorchContextParallelConfig", "TorchTensorParallelConfig",
        "TorchTensorParallelPlugin",
    ), "accel_plugins.parallelism.handlers"),
    **dict.fromkeys(("BnbQuantizationConfig",), "accel_quant.bnb.config"),
    **dict.fromkeys((
        "ComputeEnvironment", "CustomDtype", "DDPCommunicationHookType", "DistributedType", "DynamoBackend",
        "FP8BackendType", "LoggerType", "PrecisionType", "RNGType", "SageMakerDistributedType",
    ), "accel_state.labels"),
    **dict.fromkeys((
        "MITA_PROFILING_AVAILABLE_PYTORCH_VERSION", "XPU_PROFILING_AVAILABLE_PYTORCH_VERSION",
    ), "accel_state.versions"),
}
__getattr__, __dir__ = attach(__name__, _EXPORTS)
