"""Loggers that speak once per run rather than once per process."""

from accel_state.lazy import attach

attach(__name__, "accel._internal")
