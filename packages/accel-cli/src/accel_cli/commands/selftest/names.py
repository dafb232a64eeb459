"""Names of the checks, in their order; imports no torch."""

from __future__ import annotations

CHECK_NAMES = ("processes", "collectives", "data loader", "training", "mixed precision", "checkpoint")
"""The keys of `accel_cli.commands.selftest.checks.CHECKS`."""
