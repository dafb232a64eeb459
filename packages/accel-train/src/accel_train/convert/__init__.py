"""Checkpoints from one format to another, with less memory than the model."""
