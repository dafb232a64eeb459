"""FP8: train with torchao, TransformerEngine and MS-AMP within `Accelerator`."""

from accel_state.lazy import attach

attach(__name__)
