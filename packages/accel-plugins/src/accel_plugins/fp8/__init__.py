"""FP8: train with torchao and TransformerEngine within `Accelerator`."""

from accel_state.lazy import attach

attach(__name__)
