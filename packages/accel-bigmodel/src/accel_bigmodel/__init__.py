"""Models larger than memory: meta models, device maps, mapped checkpoints, offload."""

from accel_state.lazy import attach

attach(__name__)
