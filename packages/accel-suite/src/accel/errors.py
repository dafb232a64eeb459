"""The errors that accel raises on purpose."""

from accel_state.lazy import attach

attach(__name__, "accel._internal")
