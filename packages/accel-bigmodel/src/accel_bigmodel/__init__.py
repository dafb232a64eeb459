"""Models larger than memory: meta models, device maps, mapped checkpoints, offload."""

from accel_state._lazy import attach

attach(__name__)
