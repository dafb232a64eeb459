"""Estimate the memory of a model: its weights, and its training by strategy."""
