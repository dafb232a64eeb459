"""The sizes of the axes of a device mesh."""

from accel_state.lazy import attach

attach(__name__, "accel._internal")
