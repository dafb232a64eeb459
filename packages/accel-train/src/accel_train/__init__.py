"""Training: `Accelerator`, its data loaders, optimizer and scheduler wrappers. It is the export table."""

from accel_state.lazy import attach

attach(__name__)
