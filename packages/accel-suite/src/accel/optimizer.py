"""The optimizer that `prepare` returns."""

from accel_state.lazy import attach

attach(__name__, "accel._internal")
