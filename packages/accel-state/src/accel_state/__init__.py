"""Topology, device, settings and collectives of a process. Names are imported at their first use."""

from accel_state._lazy import attach

attach(__name__)
