"""Strategies, precision policies and their options. Names are imported at first use."""

from accel_state.lazy import attach

attach(__name__)
