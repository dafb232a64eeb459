"""Mixed precision by hand."""

from __future__ import annotations

import pytest
import torch

from accel_plugins.kwargs import AutocastKwargs
from accel_plugins.precision import ShardedGradScaler, get_grad_scaler, get_mixed_precision_context_manager
from accel_state.accelerator_state import AcceleratorState


def product_type() -> torch.dtype:
    return (torch.ones(2, 2) @ torch.ones(2, 2)).dtype


@pytest.mark.parametrize(
    ("native", "enabled", "expected"),
    [(True, True, torch.bfloat16), (True, False, torch.float32), (False, True, torch.float32)],
)
def test_operations_run_in_the_precision_of_the_process(
    native: bool, enabled: bool, expected: torch.dtype
) -> None:
    AcceleratorState(mixed_precision="bf16", cpu=True)
    with get_mixed_precision_context_manager(native, AutocastKwargs(enabled=enabled)):
        assert product_type() is expected


def test_a_scaler_scales_and_shares_whether_gradients_are_finite():
    AcceleratorState(cpu=True)
    scaler = get_grad_scaler(init_scale=8.0)
    assert scaler.scale(torch.ones(1)).item() == 8.0
    assert not isinstance(scaler, ShardedGradScaler)
    assert isinstance(get_grad_scaler("FSDP"), ShardedGradScaler)
