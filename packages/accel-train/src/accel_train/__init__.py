"""Training: `Accelerator`, its data loaders, optimizer and scheduler wrappers. This is the export table."""

from accel_state._lazy import attach

attach(__name__)
