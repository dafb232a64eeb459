"""`prepare` in steps: sort the arguments, run the stages in order, return in the caller's order."""

from __future__ import annotations

STAGE_NAMES: tuple[str, ...] = (
    "check",
    "recipe",
    "precision",
    "wrap",
    "compile",
    "optimizers",
    "dataloaders",
    "schedulers",
)
"""Every stage sees the bundle that the stages before it have changed.

A recipe converts models before their parameters are sharded. Precision comes before the strategy wraps, so
that the strategy's own communication stays outside autocast; compiling comes after, so that the compiler sees
the all-reduce of gradients; optimizers, loaders and schedulers come last, in the order in which they
depend on each other.
"""
