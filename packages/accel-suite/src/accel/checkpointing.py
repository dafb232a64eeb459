"""What a saved state consists of."""

from accel_state.lazy import attach

attach(__name__, "accel._internal")
