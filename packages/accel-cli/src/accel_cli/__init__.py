"""The `accel` command: start and inspect PyTorch programs on any number of devices."""

from accel_state.lazy import attach

attach(__name__)
