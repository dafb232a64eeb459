"""Strategies, precision policies, and what configures them. Names are imported when asked for."""

from accel_state.lazy import attach

attach(__name__)
