"""Collectives, moves and conversions of nested data: the export table."""

from accel_state._lazy import attach

attach(__name__)
