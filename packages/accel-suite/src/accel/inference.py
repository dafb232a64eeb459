"""Pipelined inference over several devices."""

from accel_state.lazy import attach

attach(__name__, "accel._internal")
