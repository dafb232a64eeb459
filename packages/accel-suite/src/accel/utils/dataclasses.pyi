# fmt: off
from accel_ops.modules import get_module_class_from_name as get_module_class_from_name
from accel_ops.tree import TensorInformation as TensorInformation
from accel_plugins.deepspeed.plugin import DeepSpeedPlugin as DeepSpeedPlugin
from accel_plugins.fsdp.plugin import FullyShardedDataParallelPlugin as FullyShardedDataParallelPlugin
from accel_plugins.kwargs.amp import AutocastKwargs as AutocastKwargs, GradScalerKwargs as GradScalerKwargs
from accel_plugins.kwargs.base import KwargsHandler as KwargsHandler
from accel_plugins.kwargs.ddp import DistributedDataParallelKwargs as DistributedDataParallelKwargs
from accel_plugins.kwargs.dynamo import TorchDynamoPlugin as TorchDynamoPlugin
from accel_plugins.kwargs.fp8 import (
    AORecipeKwargs as AORecipeKwargs, FP8RecipeKwargs as FP8RecipeKwargs,
    MSAMPRecipeKwargs as MSAMPRecipeKwargs, TERecipeKwargs as TERecipeKwargs,
)
from accel_plugins.kwargs.profile import ProfileKwargs as ProfileKwargs
from accel_plugins.kwargs.run import (
    DataLoaderConfiguration as DataLoaderConfiguration,
    GradientAccumulationPlugin as GradientAccumulationPlugin,
    InitProcessGroupKwargs as InitProcessGroupKwargs, ProjectConfiguration as ProjectConfiguration,
)
from accel_plugins.megatron.plugin import MegatronLMPlugin as MegatronLMPlugin
from accel_plugins.parallelism.handlers import (
    DeepSpeedSequenceParallelConfig as DeepSpeedSequenceParallelConfig,
    TorchContextParallelConfig as TorchContextParallelConfig,
    TorchTensorParallelConfig as TorchTensorParallelConfig,
    TorchTensorParallelPlugin as TorchTensorParallelPlugin,
)
from accel_quant.bnb.config import BnbQuantizationConfig as BnbQuantizationConfig
from accel_state.labels import (
    ComputeEnvironment as ComputeEnvironment, CustomDtype as CustomDtype,
    DDPCommunicationHookType as DDPCommunicationHookType, DistributedType as DistributedType,
    DynamoBackend as DynamoBackend, FP8BackendType as FP8BackendType, LoggerType as LoggerType,
    PrecisionType as PrecisionType, RNGType as RNGType,
    SageMakerDistributedType as SageMakerDistributedType,
)
from accel_state.versions import (
    MITA_PROFILING_AVAILABLE_PYTORCH_VERSION as MITA_PROFILING_AVAILABLE_PYTORCH_VERSION,
    XPU_PROFILING_AVAILABLE_PYTORCH_VERSION as XPU_PROFILING_AVAILABLE_PYTORCH_VERSION,
)
