# fmt: off
__version__: str
__accel_version__: str
from accel import (
    accelerator as accelerator, big_modeling as big_modeling, checkpointing as checkpointing,
    data_loader as data_loader, errors as errors, hooks as hooks, inference as inference,
    launchers as launchers, local_sgd as local_sgd, logging as logging, memory_utils as memory_utils,
    optimizer as optimizer, optimizers as optimizers, parallelism_config as parallelism_config,
    scheduler as scheduler, settings as settings, state as state, test_utils as test_utils,
    tracking as tracking, utils as utils,
)
from accel_bigmodel.device_map import infer_auto_device_map as infer_auto_device_map
from accel_bigmodel.dispatch import (
    cpu_offload as cpu_offload, cpu_offload_with_hook as cpu_offload_with_hook,
    disk_offload as disk_offload, dispatch_model as dispatch_model,
)
from accel_bigmodel.empty import init_empty_weights as init_empty_weights, init_on_device as init_on_device
from accel_bigmodel.load import (
    load_checkpoint_and_dispatch as load_checkpoint_and_dispatch,
    load_checkpoint_in_model as load_checkpoint_in_model,
)
from accel_bigmodel.pipeline import prepare_pippy as prepare_pippy
from accel_plugins.ddp import DistributedDataParallelKwargs as DistributedDataParallelKwargs
from accel_plugins.deepspeed.plugin import DeepSpeedPlugin as DeepSpeedPlugin
from accel_plugins.fsdp.plugin import FullyShardedDataParallelPlugin as FullyShardedDataParallelPlugin
from accel_plugins.kwargs import (
    AutocastKwargs as AutocastKwargs, DataLoaderConfiguration as DataLoaderConfiguration,
    GradScalerKwargs as GradScalerKwargs, InitProcessGroupKwargs as InitProcessGroupKwargs,
    ProfileKwargs as ProfileKwargs,
)
from accel_plugins.parallelism.config import ParallelismConfig as ParallelismConfig
from accel_state.labels import (
    DDPCommunicationHookType as DDPCommunicationHookType, DistributedType as DistributedType,
)
from accel_state.libraries import is_rich_available as is_rich_available
from accel_state.memory import find_executable_batch_size as find_executable_batch_size
from accel_state.partial_state import PartialState as PartialState
from accel_state.rng import synchronize_rng_states as synchronize_rng_states
from accel_train.accelerator import Accelerator as Accelerator
from accel_train.data.prepare import skip_first_batches as skip_first_batches
from accel_train.launching import (
    debug_launcher as debug_launcher, launch as launch, notebook_launcher as notebook_launcher,
)
