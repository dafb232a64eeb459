# fmt: off
from accel_state.memory import find_executable_batch_size as find_executable_batch_size
