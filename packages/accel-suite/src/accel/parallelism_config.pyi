# fmt: off
from accel_plugins.parallelism.config import ParallelismConfig as ParallelismConfig
