"""Topology, device, settings and collectives of a process. Names are imported at their first use."""

from accel_state.lazy import attach

attach(__name__)
