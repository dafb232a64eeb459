"""Sharded models: materialise, optimise and save them."""

from accel_state.lazy import attach

# Imported by the first use: torch.distributed.tensor imports sympy, 0.3 s.
attach(__name__)
