"""Fully sharded data parallelism: the plugin, and what models and optimizers go through for it."""
