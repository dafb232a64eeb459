# fmt: off
from accel_ops.modules import get_module_class_from_name as get_module_class_from_name
from accel_ops.tree import TensorInformation as TensorInformation
from accel_plugins.ddp import DistributedDataParallelKwargs as DistributedDataParallelKwargs
from accel_plugins.deepspeed.plugin import DeepSpeedPlugin as DeepSpeedPlugin
from accel_plugins.fp8.recipe import (
    AORecipeKwargs as AORecipeKwargs, FP8RecipeKwargs as FP8RecipeKwargs,
    MSAMPRecipeKwargs as MSAMPRecipeKwargs, TERecipeKwargs as TERecipeKwargs,
)
from accel_plugins.fsdp.plugin import FullyShardedDataParallelPlugin as FullyShardedDataParallelPlugin
from accel_plugins.kwargs import (
    AutocastKwargs as AutocastKwargs, DataLoaderConfiguration as DataLoaderConfiguration,
    GradScalerKwargs as GradScalerKwargs, GradientAccumulationPlugin as GradientAccumulationPlugin,
    InitProcessGroupKwargs as InitProcessGroupKwargs, KwargsHandler as KwargsHandler,
    ProfileKwargs as ProfileKwargs, ProjectConfiguration as ProjectConfiguration,
    TorchDynamoPlugin as TorchDynamoPlugin,
)
from accel_plugins.megatron.plugin import MegatronLMPlugin as MegatronLMPlugin
from accel_plugins.parallelism.config import (
    DeepSpeedSequenceParallelConfig as DeepSpeedSequenceParallelConfig,
    TorchContextParallelConfig as TorchContextParallelConfig,
    TorchTensorParallelConfig as TorchTensorParallelConfig,
    TorchTensorParallelPlugin as TorchTensorParallelPlugin,
)
from accel_quant.config import BnbQuantizationConfig as BnbQuantizationConfig
from accel_state.labels import (
    ComputeEnvironment as ComputeEnvironment, CustomDtype as CustomDtype,
    DDPCommunicationHookType as DDPCommunicationHookType, DistributedType as DistributedType,
    DynamoBackend as DynamoBackend, FP8BackendType as FP8BackendType, LoggerType as LoggerType,
    PrecisionType as PrecisionType, RNGType as RNGType,
    SageMakerDistributedType as SageMakerDistributedType,
)
from accel_state.libraries import (
    MITA_PROFILING_AVAILABLE_PYTORCH_VERSION as MITA_PROFILING_AVAILABLE_PYTORCH_VERSION,
    XPU_PROFILING_AVAILABLE_PYTORCH_VERSION as XPU_PROFILING_AVAILABLE_PYTORCH_VERSION,
)
