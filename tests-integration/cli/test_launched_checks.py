"""The checks that programs start under the paths of Accelerate's test scripts, on their own ranks."""

from __future__ import annotations

from contextlib import nullcontext
from unittest.mock import patch

import pytest

import accel_cli.commands.selftest_checks as checks
from accel.test_utils.scripts import test_ops, test_script, test_sync
from accel_train import Accelerator
from harness import distributed


@distributed(world_size=2)
def test_the_scripts_are_the_checks_and_pass() -> None:
    test_ops.main()
    test_sync.main()
    test_script.main()


@distributed(world_size=2)
def test_gradients_that_are_synchronised_too_early_are_found() -> None:
    early = patch.object(Accelerator, "no_sync", lambda _self, _model: nullcontext())
    with early, pytest.raises(AssertionError, match="the gradient without synchronisation"):
        test_sync.main()


@distributed(world_size=2)
def test_a_wrong_sum_is_found() -> None:
    unreduced = patch.object(checks, "reduce", lambda tensor, _reduction: tensor)
    with unreduced, pytest.raises(AssertionError, match="reduce to the sum"):
        test_ops.main()
