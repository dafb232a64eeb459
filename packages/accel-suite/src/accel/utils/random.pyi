# fmt: off
from accel_state.rng import (
    set_seed as set_seed, synchronize_rng_state as synchronize_rng_state,
    synchronize_rng_states as synchronize_rng_states,
)
