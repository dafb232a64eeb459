"""Models with 8-bit and 4-bit weights."""

from accel_state.lazy import attach

attach(__name__)
