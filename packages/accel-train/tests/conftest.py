"""What the tests of accel-train share."""

from __future__ import annotations

import pytest

from accel_state.accelerator_state import AcceleratorState
from accel_state.gradient_state import GradientState


def forget_the_run():
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.fixture(autouse=True)
def fresh_run():
    """Every test begins and ends without a started run."""
    forget_the_run()
    yield
    forget_the_run()
