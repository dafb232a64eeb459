from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from accel_inspect.check.strategy import ELEMENTWISE, step_on_local_shards


@pytest.mark.parametrize("kind", sorted(ELEMENTWISE, key=lambda kind: kind.__name__))
def test_an_optimizer_of_plain_tensors_steps_as_ever(kind):
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    other.load_state_dict(model.state_dict())
    for stepped, context in ((model, step_on_local_shards), (other, nullcontext)):
        optimizer = kind(stepped.parameters(), lr=0.1)
        for _ in range(2):
            stepped(torch.ones(1, 3)).sum().backward()
            with context(optimizer):
                optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
