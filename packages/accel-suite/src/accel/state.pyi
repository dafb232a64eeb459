# fmt: off
from accel_state.accelerator_state import (
    AcceleratorState as AcceleratorState, ThreadLocalSharedDict as ThreadLocalSharedDict,
    do_nothing as do_nothing, is_initialized as is_initialized,
)
from accel_state.gradient_state import GradientState as GradientState
from accel_state.partial_state import PartialState as PartialState
