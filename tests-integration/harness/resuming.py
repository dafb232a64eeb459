"""Check that what a run saves is what it loads, on every rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def check_resuming(accelerator: Any, model: nn.Module, optimizer: Any, folder: Path) -> None:
    """Save, change everything, load, and expect what was saved, the state of AdamW included."""
    accelerator.save_state(folder, flush=False)
    tensors = [*model.parameters(), *(v["exp_avg"] for v in optimizer.state.values())]
    saved = [local(tensor).clone() for tensor in tensors]
    with torch.no_grad():
        for tensor in tensors:
            local(tensor).add_(1)
    accelerator.load_state(folder)
    now = [*model.parameters(), *(v["exp_avg"] for v in optimizer.state.values())]
    for tensor, value in zip(now, saved, strict=True):
        assert torch.equal(local(tensor), value)


def local(tensor: Any) -> Tensor:
    """Return this rank's shard of a tensor."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
