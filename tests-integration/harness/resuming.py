"""Check that what a run saves is what it loads, on every rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def check_resuming(accelerator: Any, model: nn.Module, optimizer: Any, folder: Path) -> None:
    """Save, change everything, load, and expect what was saved, the optimizer's state included."""
    accelerator.save_state(folder, flush=False)
    tensors = _tensors_of(model, optimizer)
    saved = [local(tensor).clone() for tensor in tensors]
    with torch.no_grad():
        for tensor in tensors:
            local(tensor).add_(1)
    accelerator.load_state(folder)
    for tensor, value in zip(_tensors_of(model, optimizer), saved, strict=True):
        assert torch.equal(local(tensor), value)


def _tensors_of(model: nn.Module, optimizer: Any) -> list[Tensor]:
    states = [optimizer.state[p] for group in optimizer.param_groups for p in group["params"]]
    values = [value for state in states for _, value in sorted(state.items())]
    return [*model.parameters(), *(value for value in values if value.dim())]


def local(tensor: Any) -> Tensor:
    """Return this rank's shard of a tensor."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
