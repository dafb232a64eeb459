"""Inspect a run: `accel check`, `accel doctor` and `accel estimate-memory`. It is the export table."""

from accel_state.lazy import attach

attach(__name__)
