"""Sharded models and their checkpoints."""

from accel_state.lazy import attach

attach(__name__, "accel._internal")
