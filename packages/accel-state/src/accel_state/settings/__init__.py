"""Typed settings of a run, from arguments, environment variables and config files. Torch-free."""

from accel_state._lazy import attach

attach(__name__)
