"""Experiment trackers behind one interface."""

from accel_state._lazy import attach

attach(__name__)
