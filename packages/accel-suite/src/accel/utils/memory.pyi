# fmt: off
from accel_state.memory import (
    clear_device_cache as clear_device_cache, find_executable_batch_size as find_executable_batch_size,
    release_memory as release_memory, should_reduce_batch_size as should_reduce_batch_size,
)
