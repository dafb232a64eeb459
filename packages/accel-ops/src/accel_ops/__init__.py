"""Collectives, moves and conversions of nested data: the export table."""

from accel_state.lazy import attach

attach(__name__)
