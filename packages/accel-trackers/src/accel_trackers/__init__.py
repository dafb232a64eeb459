"""Experiment trackers behind one interface."""

from accel_state.lazy import attach

attach(__name__)
