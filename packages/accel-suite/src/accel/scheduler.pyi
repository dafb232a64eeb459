# fmt: off
from accel_plugins.optimizer import AcceleratedScheduler as AcceleratedScheduler
