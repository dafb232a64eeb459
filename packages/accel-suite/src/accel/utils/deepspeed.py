"""What DeepSpeed's engine is wrapped in.

Written by tools/gen_exports.py from api.toml and aliases.toml; change it there.
"""

# fmt: off
from __future__ import annotations

from typing import TYPE_CHECKING

from accel_state._lazy import attach

if TYPE_CHECKING:
    from accel_plugins.deepspeed.dummy import DummyOptim, DummyScheduler
    from accel_plugins.deepspeed.engine import DeepSpeedEngineWrapper
    from accel_plugins.deepspeed.hf_config import HfDeepSpeedConfig
    from accel_plugins.deepspeed.optimizers import map_pytorch_optim_to_deepspeed
    from accel_plugins.deepspeed.plugin import get_active_deepspeed_plugin
    from accel_train.deepspeed import DeepSpeedOptimizerWrapper, DeepSpeedSchedulerWrapper

__all__ = [
    "DeepSpeedEngineWrapper", "DeepSpeedOptimizerWrapper", "DeepSpeedSchedulerWrapper", "DummyOptim",
    "DummyScheduler", "HfDeepSpeedConfig", "get_active_deepspeed_plugin", "map_pytorch_optim_to_deepspeed",
]

_EXPORTS = {
    **dict.fromkeys(("DummyOptim", "DummyScheduler"), "accel_plugins.deepspeed.dummy"),
    **dict.fromkeys(("DeepSpeedEngineWrapper",), "accel_plugins.deepspeed.engine"),
    **dict.fromkeys(("HfDeepSpeedConfig",), "accel_plugins.deepspeed.hf_config"),
    **dict.fromkeys(("map_pytorch_optim_to_deepspeed",), "accel_plugins.deepspeed.optimizers"),
    **dict.fromkeys(("get_active_deepspeed_plugin",), "accel_plugins.deepspeed.plugin"),
    **dict.fromkeys(("DeepSpeedOptimizerWrapper", "DeepSpeedSchedulerWrapper"), "accel_train.deepspeed"),
}
__getattr__, __dir__ = attach(__name__, _EXPORTS)
