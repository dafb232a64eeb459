"""Documented dataclasses of options of PyTorch and accel."""
