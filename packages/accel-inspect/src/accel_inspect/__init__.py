"""Inspect a training run: `accel check`, `accel doctor` and `accel estimate-memory`."""
