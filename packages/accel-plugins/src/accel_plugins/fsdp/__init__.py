"""Fully sharded data parallelism: the plugin, and the preparation of models and optimizers."""

from accel_state.lazy import attach

# Imported by the first use, as they need torch.distributed.fsdp.
attach(__name__)
