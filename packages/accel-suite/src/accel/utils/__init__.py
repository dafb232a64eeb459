"""Nested data, settings, availability, plugin dataclasses."""

from accel_state.lazy import attach

attach(__name__, "accel._internal")
