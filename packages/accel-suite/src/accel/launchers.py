"""Starting processes from a notebook or a test."""

from accel_state.lazy import attach

attach(__name__, "accel._internal")
