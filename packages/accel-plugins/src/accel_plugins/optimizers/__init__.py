"""Optimizers that know shards: Muon, with AdamW for what is no matrix."""

from accel_state.lazy import attach

# Imported by the first use: torch.distributed.tensor imports sympy, 0.3 s.
attach(__name__)
