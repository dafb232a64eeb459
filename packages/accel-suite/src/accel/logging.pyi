# fmt: off
from accel_state.logging import MultiProcessAdapter as MultiProcessAdapter, get_logger as get_logger
