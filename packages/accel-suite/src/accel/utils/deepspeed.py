"""What DeepSpeed's engine is wrapped in. Written by tools/gen_exports.py."""

from accel_state._lazy import attach

attach(__name__)
