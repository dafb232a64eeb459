"""What can be set from outside a script, typed."""

from accel_state.lazy import attach

attach(__name__, "accel._internal")
