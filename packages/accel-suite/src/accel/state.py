"""What this process is: rank, device, precision, accumulation."""

from accel_state.lazy import attach

attach(__name__, "accel._internal")
