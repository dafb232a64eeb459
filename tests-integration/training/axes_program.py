"""Run by every rank of `test_axes_gpu.py`: train along axes of parallelism, and compare with one process.

The arguments are `cpu` or `accelerator`, the sizes as JSON, and the attention implementation.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from accel_plugins.kwargs import DataLoaderConfiguration
from accel_plugins.parallelism.config import ParallelismConfig
from accel_train import Accelerator
from parallelism_table import MAX_NORM, ROWS, differences, make_model, make_optimizer, token_rows

STEPS, BOUND = 5, 1e-4


def train(accelerator: Accelerator, *, experts: bool, attention: str) -> dict[str, Any]:
    """Train through `Accelerator`; without axes that is one process."""
    model: Any = make_model(experts=experts)
    model.set_attn_implementation(attention)
    loader = DataLoader(token_rows(STEPS), batch_size=ROWS)
    model, optimizer, loader = accelerator.prepare(model, make_optimizer(model), loader)
    losses, norms = [], []
    for batch in loader:
        loss = model(**batch).loss
        accelerator.backward(loss)
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
        norms.append(float(accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)))
        optimizer.step()
        optimizer.zero_grad()
    weights = {name: value.cpu() for name, value in accelerator.get_state_dict(model).items()}
    return {"losses": losses, "norms": norms, "weights": weights}


def train_alone(device: torch.device, *, experts: bool) -> dict[str, Any]:
    """Train in plain PyTorch on one device."""
    model = make_model(experts=experts).to(device)
    optimizer = make_optimizer(model)
    losses, norms = [], []
    for batch in DataLoader(token_rows(STEPS), batch_size=ROWS):
        loss = model(**{name: value.to(device) for name, value in batch.items()}).loss
        loss.backward()
        losses.append(loss.item())
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
        optimizer.zero_grad()
    weights = {name: value.cpu() for name, value in model.state_dict().items()}
    return {"losses": losses, "norms": norms, "weights": weights}


def main(where: str, sizes: str, attention: str) -> None:
    """Train in both ways, and compare losses, norms and weights."""
    axes = json.loads(sizes)
    accelerator = Accelerator(
        cpu=where == "cpu",
        parallelism_config=ParallelismConfig(**axes),
        dataloader_config=DataLoaderConfiguration(split_batches=True),
    )
    experts = "ep_size" in axes
    found = train(accelerator, experts=experts, attention=attention)
    if accelerator.is_main_process:
        right = train_alone(accelerator.device, experts=experts)
        largest = differences(found, right)
        print(f"{axes}: largest difference of a loss, a norm, a weight: {largest}")
        assert max(largest) <= BOUND, largest


if __name__ == "__main__":
    main(*sys.argv[1:])
    dist.destroy_process_group()
