"""Sharded models and their checkpoints. Written by tools/gen_exports.py."""

from accel_state._lazy import attach

attach(__name__)
