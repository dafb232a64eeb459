"""Precision policies: in which number formats models compute."""

from accel_state._lazy import attach

attach(__name__)
