"""What the tests of accel-convert share."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

from accel_state.accelerator_state import AcceleratorState, GradientState

# How long a machine takes says nothing about what is tested.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
if settings.get_current_profile_name() == "default":  # else another conftest has chosen one
    settings.load_profile("patient")


def forget_the_run():
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.fixture(autouse=True)
def fresh_run():
    """Every test begins and ends without a started run."""
    forget_the_run()
    yield
    forget_the_run()
