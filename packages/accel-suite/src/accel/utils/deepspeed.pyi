# fmt: off
from accel_plugins.deepspeed.config import (
    DummyOptim as DummyOptim, DummyScheduler as DummyScheduler, HfDeepSpeedConfig as HfDeepSpeedConfig,
)
from accel_plugins.deepspeed.engine import (
    DeepSpeedEngineWrapper as DeepSpeedEngineWrapper,
    DeepSpeedOptimizerWrapper as DeepSpeedOptimizerWrapper,
    DeepSpeedSchedulerWrapper as DeepSpeedSchedulerWrapper,
)
from accel_plugins.deepspeed.library import map_pytorch_optim_to_deepspeed as map_pytorch_optim_to_deepspeed
from accel_plugins.deepspeed.plugin import get_active_deepspeed_plugin as get_active_deepspeed_plugin
