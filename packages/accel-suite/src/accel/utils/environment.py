"""Environment variables, CPU topology and driver facts."""

from accel_state.lazy import attach

attach(__name__, "accel._internal")
