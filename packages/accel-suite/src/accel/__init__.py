"""One training script, unchanged, on any number of devices."""

from accel_state.lazy import attach

__version__ = "1.15.0"
"""The version of Accelerate whose interface accel has."""
__accel_version__ = "0.1.0"
"""The version of accel."""

attach(__name__, "accel._internal")
