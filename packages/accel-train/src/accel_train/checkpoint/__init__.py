"""Checkpoints: complete or absent, verified, and out of the way of training."""
