"""Sharded states of models and optimizers, by name, and PyTorch Distributed Checkpoint (DCP) folders."""

from accel_state._lazy import attach

attach(__name__)
