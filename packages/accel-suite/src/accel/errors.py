"""The errors that accel raises on purpose. Written by tools/gen_exports.py."""

from accel_state.lazy import attach

attach(__name__, "accel._internal")
