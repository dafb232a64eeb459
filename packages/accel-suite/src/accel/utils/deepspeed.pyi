# fmt: off
from accel_plugins.deepspeed.dummy import DummyOptim as DummyOptim, DummyScheduler as DummyScheduler
from accel_plugins.deepspeed.engine import DeepSpeedEngineWrapper as DeepSpeedEngineWrapper
from accel_plugins.deepspeed.hf_config import HfDeepSpeedConfig as HfDeepSpeedConfig
from accel_plugins.deepspeed.optimizers import (
    map_pytorch_optim_to_deepspeed as map_pytorch_optim_to_deepspeed,
)
from accel_plugins.deepspeed.plugin import get_active_deepspeed_plugin as get_active_deepspeed_plugin
from accel_train.deepspeed import (
    DeepSpeedOptimizerWrapper as DeepSpeedOptimizerWrapper,
    DeepSpeedSchedulerWrapper as DeepSpeedSchedulerWrapper,
)
