from __future__ import annotations

import torch

from accel_cli.commands.selftest_checks import median_seconds
from accel_state.testing import late_device


def test_a_measurement_begins_and_ends_with_a_device_that_has_nothing_to_do():
    with late_device() as device:
        host, target = device.pinned(16), device.empty(16)
        device.copy_(target, host)  # The copy of another caller.
        before: list[int] = []

        def copy() -> None:
            before.append(device.pending)
            device.copy_(target, host)

        assert median_seconds(copy, torch.device("cpu")) > 0
        assert before == [0] * 6
        assert device.pending == 0
