"""Optimizers that know shards: Muon with AdamW for what is no matrix; an AdamW with its state on the host."""

from accel_state.lazy import attach

# Imported by the first use: torch.distributed.tensor imports sympy, 0.3 s.
attach(__name__)
