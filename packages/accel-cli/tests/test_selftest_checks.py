"""How the self test measures."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from accel_cli.commands.selftest_checks import median_seconds
from accel_state.streams import device_streams


@pytest.mark.gpu
def test_a_measurement_begins_and_ends_with_a_device_that_has_nothing_to_do(simulated: Any) -> None:
    streams = device_streams(torch.device(simulated.NAME, 0))
    assert streams is not None
    host, target = streams.pinned(16), streams.empty(16)
    streams.copy_(target, host)  # The copy of another caller.
    before: list[int] = []

    def copy() -> None:
        before.append(simulated.late_copies())
        streams.copy_(target, host)

    assert median_seconds(copy, streams.device) > 0
    assert before == [0] * 6
    assert simulated.late_copies() == 0
