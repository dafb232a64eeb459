# fmt: off
from accel_state.batch_size import find_executable_batch_size as find_executable_batch_size
