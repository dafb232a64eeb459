"""Train a small Llama (with experts: a Mixtral) along axes of parallelism, and compare with one process.

`test_axes.py` calls it on the CPU; every rank of `test_axes_gpu.py` runs it. The arguments are then `cpu` or
`accelerator`, the sizes as JSON, and the attention implementation.
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from accel_plugins.kwargs import DataLoaderConfiguration
from accel_plugins.parallelism.config import ParallelismConfig
from accel_train import Accelerator

if TYPE_CHECKING:
    from collections.abc import Mapping

ROWS, LENGTH, VOCABULARY, STEPS = 8, 16, 64, 5
MAX_NORM = 0.2
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": LENGTH,
    "use_cache": False,
}


def make_model(*, experts: bool) -> Any:
    """Return the model with its first weights."""
    torch.manual_seed(0)
    model: Any = (
        MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2))
        if experts
        else LlamaForCausalLM(LlamaConfig(**SIZES))
    )
    with torch.no_grad():
        for parameter in model.parameters():  # the constructor of Mixtral leaves experts uninitialized
            parameter.normal_(std=0.1)
    return model


def make_optimizer(model: Any) -> torch.optim.Optimizer:
    """Return AdamW, whose large epsilon lets gradients of a wrong size show."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-2, weight_decay=1e-3)


def make_loader() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, VOCABULARY, (STEPS * ROWS, LENGTH), generator=generator)
    samples: Any = [{"input_ids": row, "labels": row} for row in tokens]
    return DataLoader(samples, batch_size=ROWS)


def train(accelerator: Accelerator, sizes: Mapping[str, int], attention: str = "sdpa") -> dict[str, Any]:
    """Train through `Accelerator`; without axes that is one process."""
    model = make_model(experts="ep_size" in sizes)
    model.set_attn_implementation(attention)
    model, optimizer, loader = accelerator.prepare(model, make_optimizer(model), make_loader())
    losses, norms = [], []
    for batch in loader:
        loss = backward(accelerator, model, batch, sizes.get("cp_size"))
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
        norms.append(float(accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)))
        optimizer.step()
        optimizer.zero_grad()
    weights = {name: value.cpu() for name, value in accelerator.get_state_dict(model).items()}
    return {"losses": losses, "norms": norms, "weights": weights}


def backward(accelerator: Accelerator, model: Any, batch: dict[str, Any], shards: int | None) -> torch.Tensor:
    """Run both passes, in a context of shards as the guide does; return this rank's share of the loss."""
    if shards is None:
        loss = model(**batch).loss
        accelerator.backward(loss)
        return loss
    tokens = batch["input_ids"]
    labels = torch.cat([tokens[:, 1:], torch.full_like(tokens[:, :1], -100)], dim=1)
    buffers = [tokens.clone(), labels, torch.arange(LENGTH).repeat(len(tokens), 1)]
    count = int((labels != -100).sum())
    with accelerator.maybe_context_parallel(buffers, [1] * 3, {*buffers}):
        tokens, labels, positions = buffers
        loss = model(
            input_ids=tokens,
            position_ids=positions,
            labels=labels,
            shift_labels=labels,
            num_items_in_batch=count / shards,
        ).loss
        accelerator.backward(loss)
    return loss


def train_alone(device: torch.device, *, experts: bool) -> dict[str, Any]:
    """Train in plain PyTorch on one device."""
    model = make_model(experts=experts).to(device)
    optimizer = make_optimizer(model)
    losses, norms = [], []
    for batch in make_loader():
        loss = model(**{name: value.to(device) for name, value in batch.items()}).loss
        loss.backward()
        losses.append(loss.item())
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
        optimizer.zero_grad()
    weights = {name: value.cpu() for name, value in model.state_dict().items()}
    return {"losses": losses, "norms": norms, "weights": weights}


def compare(sizes: Mapping[str, int], *, cpu: bool, attention: str = "sdpa", bound: float) -> None:
    """Train in both ways; the main process compares losses, norms and weights."""
    accelerator = Accelerator(
        cpu=cpu,
        parallelism_config=ParallelismConfig(**sizes),
        dataloader_config=DataLoaderConfiguration(split_batches=True),
    )
    found = train(accelerator, sizes, attention)
    if accelerator.is_main_process:
        right = train_alone(accelerator.device, experts="ep_size" in sizes)
        assert found["weights"].keys() == right["weights"].keys()
        largest = [
            max(abs(a - b) for a, b in zip(found[name], right[name], strict=True))
            for name in ("losses", "norms")
        ]
        pairs = ((value.float(), right["weights"][name]) for name, value in found["weights"].items())
        largest.append(max((a - b).abs().max().item() for a, b in pairs))
        print(f"{dict(sizes)}: largest difference of a loss, a norm, a weight: {largest}")
        assert max(largest) <= bound, largest


if __name__ == "__main__":
    compare(json.loads(sys.argv[2]), cpu=sys.argv[1] == "cpu", attention=sys.argv[3], bound=1e-4)
    dist.destroy_process_group()
