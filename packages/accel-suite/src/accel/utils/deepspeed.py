"""What DeepSpeed's engine is wrapped in."""

from accel_state.lazy import attach

attach(__name__, "accel._internal")
