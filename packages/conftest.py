# ruff: noqa: INP001 - packages/ is a folder, not a package
"""What the unit tests of all packages share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import HealthCheck, settings

from shared_test_rules import (
    leaves_nothing_behind,
    one_thread,
    pytest_collection_finish,
    pytest_collection_modifyitems,
    simulated,
)

if TYPE_CHECKING:
    import pytest

__all__ = [
    "leaves_nothing_behind",
    "one_thread",
    "pytest_collection_finish",
    "pytest_collection_modifyitems",
    "simulated",
]

# A `sitecustomize` acts when it is imported.
collect_ignore_glob = ["accel-compat/src/accel_compat/startup/*"]

# How long a machine takes says nothing about what is tested.
settings.register_profile("thorough", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("short", settings.get_profile("thorough"), max_examples=30)


def pytest_configure(config: pytest.Config) -> None:
    """Choose how many examples a property is tried with: few, or, where `thorough` tests run, many."""
    if settings.get_current_profile_name() == "default":  # else the program that runs pytest has chosen
        few = config.option.markexpr in {"", "not thorough"}
        settings.load_profile("short" if few else "thorough")
