# fmt: off
from accel_plugins.optimizer import (
    AcceleratedOptimizer as AcceleratedOptimizer, move_to_device as move_to_device,
    patch_optimizer_step as patch_optimizer_step,
)
