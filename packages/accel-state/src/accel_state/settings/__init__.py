"""Typed settings of a run, from arguments, environment variables and config files. Torch-free."""

from accel_state.lazy import attach

attach(__name__)
