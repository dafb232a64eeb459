# fmt: off
from accel_train.scheduler import AcceleratedScheduler as AcceleratedScheduler
