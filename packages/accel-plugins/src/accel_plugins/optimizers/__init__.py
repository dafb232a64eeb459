"""Shard-aware optimizers: Muon for matrices, AdamW for other parameters; AdamW with state on the host."""

from accel_state.lazy import attach

# Imported by the first use: torch.distributed.tensor imports sympy, 0.3 s.
attach(__name__)
