"""Names under the path by which users of Accelerate import them."""

from accel_state.lazy import attach

attach(__name__, "accel._internal")
