"""Gather the full weights of a sharded model with LoRA adapters merged, and compare with peft's own merge.

Run by torchrun as `merge_adapters.py STRATEGY`; each rank ends with an error if something differs.
"""

from __future__ import annotations

import copy
import sys
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from accel_plugins.fsdp.plugin import FullyShardedDataParallelPlugin
from accel_state.errors import UnsupportedError
from accel_train import Accelerator

PLUGINS: dict[str, Any] = {
    "ddp": dict,
    "fsdp1": lambda: {"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=1)},
    "fsdp2": lambda: {"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=2)},
}


class Net(nn.Module):
    """An embedding, a block that is adapted, one that is not, and a head that is trained as a copy."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.query = nn.Embedding(7, 6), nn.Linear(6, 10)
        self.other, self.head = nn.Linear(10, 6, bias=False), nn.Linear(6, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return scores of shape `(rows, length, 3)`."""
        return self.head(self.other(self.query(self.embedding(tokens)).tanh()))


def make(**options: Any) -> Any:
    """Return a model with an adapter of random values, and a second one that is not active."""
    torch.manual_seed(0)
    modules = {"target_modules": ["embedding", "query"], "modules_to_save": ["head"], "r": 2}
    config = LoraConfig(**modules, lora_alpha=3, init_lora_weights=False, **options)
    model = get_peft_model(Net(), config)
    if not options:
        model.add_adapter("second", LoraConfig(target_modules=["query"], r=3, init_lora_weights=False))
        model.set_adapter("default")
    return model


def main() -> None:
    """Train a step, compare, and see what is refused."""
    accelerator = Accelerator(cpu=True, **PLUGINS[sys.argv[1]]())
    for parameter in (model := make()).parameters():
        parameter.requires_grad_(requires_grad=True)  # FSDP1 wants them alike; all of them change
    alone = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.backward(model(torch.arange(6).view(2, 3)).square().sum())
    optimizer.step()
    alone(torch.arange(6).view(2, 3)).square().sum().backward()
    torch.optim.SGD(alone.parameters(), lr=0.1).step()

    found = {}
    for name, tensor in accelerator.named_full_parameters(merge_adapters=True, bucket_bytes=200):
        found[name] = tensor.clone()
    halves = dict(accelerator.named_full_parameters(merge_adapters=True, dtype=torch.bfloat16))
    unmerged = accelerator.get_state_dict(model)
    merged = alone.merge_and_unload().state_dict()
    assert sorted(found) == sorted(merged), sorted(found)
    for name, value in merged.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-6)
        assert torch.equal(halves[name], found[name].bfloat16()), name
    if accelerator.is_main_process:  # bit for bit what peft makes of the full state
        again = make()
        again.load_state_dict(unmerged)
        for name, value in again.merge_and_unload().state_dict().items():
            assert torch.equal(found[name], value), name

    refusal = ""
    try:
        accelerator.named_full_parameters(make(use_dora=True), merge_adapters=True)
    except UnsupportedError as error:
        refusal = str(error)
    assert "DoRA and biases are not" in refusal, refusal
    print("merged as peft does")


if __name__ == "__main__":
    main()
