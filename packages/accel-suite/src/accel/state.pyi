# fmt: off
from accel_state.accelerator_state import (
    AcceleratorState as AcceleratorState, GradientState as GradientState,
    ThreadLocalSharedDict as ThreadLocalSharedDict, do_nothing as do_nothing,
    is_initialized as is_initialized,
)
from accel_state.partial_state import PartialState as PartialState
