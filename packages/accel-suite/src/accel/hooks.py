"""Hooks around a module's forward pass."""

from accel_state.lazy import attach

attach(__name__, "accel._internal")
