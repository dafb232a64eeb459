"""Counting items on an accelerator: nothing waits for it."""

from __future__ import annotations

import pytest
import torch

from accel_train import Accelerator

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_counts_stay_on_the_device_and_gradients_are_divided(dtype):
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = torch.nn.Linear(1, 1, bias=False).to(dtype)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    batch = torch.ones(1, 1, dtype=dtype, device=accelerator.device)
    counts = torch.tensor([1, 3], device=accelerator.device)
    accelerator.backward(model(batch).sum(), num_items=counts[0])  # what torch sets up in the first pass
    optimizer.zero_grad()
    torch.get_device_module().set_sync_debug_mode("error")
    try:
        for index in range(2):
            with accelerator.accumulate(model):
                accelerator.backward((1 + 2 * index) * model(batch).sum(), num_items=counts[index])
    finally:
        torch.get_device_module().set_sync_debug_mode("default")
    assert model.weight.grad.item() == 1.0
