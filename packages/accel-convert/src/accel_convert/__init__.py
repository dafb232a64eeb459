"""Convert checkpoints between formats, with less memory than the model. It is the export table."""

from accel_state.lazy import attach

attach(__name__)
