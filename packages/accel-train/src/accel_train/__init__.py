"""Training: `Accelerator`, its data loaders, optimizer and scheduler wrappers. This is the export table."""

from accel_state.lazy import attach

attach(__name__)
