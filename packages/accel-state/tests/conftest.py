"""What the tests of accel-state share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from collections.abc import Iterator

# How long a machine takes says nothing about what is tested.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
if settings.get_current_profile_name() == "default":  # else another conftest has chosen one
    settings.load_profile("patient")


@pytest.fixture
def fresh() -> Iterator[None]:
    """No state exists before and after the test."""
    from accel_state import AcceleratorState, GradientState, PartialState

    states = (GradientState, AcceleratorState, PartialState)
    for state in states:
        state._reset_state()
    yield
    for state in states:
        state._reset_state()
