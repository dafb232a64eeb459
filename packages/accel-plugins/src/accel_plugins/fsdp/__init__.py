"""Fully sharded data parallelism: the plugin, and what models and optimizers go through for it."""

from accel_state.lazy import attach

# Imported by the first use, as they need torch.distributed.fsdp.
attach(__name__)
