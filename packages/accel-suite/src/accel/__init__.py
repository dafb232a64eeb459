"""One training script, unchanged, on any number of devices. Written by tools/gen_exports.py."""

from accel_state.lazy import attach

__version__ = "0.1.0"

attach(__name__, "accel._visible")
