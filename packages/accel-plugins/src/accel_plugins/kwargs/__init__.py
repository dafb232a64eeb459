"""Documented dataclasses of options of PyTorch and accel."""

from accel_state._lazy import attach

# Imported by the first use: torch's communication hooks take 0.05 s.
attach(__name__)
