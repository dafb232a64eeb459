# fmt: off
from accel_state.batch_size import (
    find_executable_batch_size as find_executable_batch_size,
    should_reduce_batch_size as should_reduce_batch_size,
)
from accel_state.memory import clear_device_cache as clear_device_cache, release_memory as release_memory
