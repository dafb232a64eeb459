"""Expert parallelism, time per step relative to a hand-written program on the same parts of PyTorch.

    uv run torchrun --nproc_per_node 2 tools/benchmarks/experts.py [--rounds 12]

Both train the same layers of experts in float32 on gloo, the experts sharded across all ranks: by
`ParallelismConfig(ep_size=...)`, and by `distribute_tensor`, `fully_shard` and an all-to-all. They alternate
within one process, and their losses are compared. Printed is the ratio of their times, the median over pairs
of rounds. Claim: at most 1.05.
"""

from __future__ import annotations

import argparse
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from alternating import compare
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.nn.functional import all_to_all_single
from torch.distributed.tensor import Shard, distribute_tensor

from accel_plugins.parallelism.config import ParallelismConfig
from accel_train import Accelerator

CLAIM = 1.05
SIZE, INSIDE, EXPERTS, TOP_K, TOKENS, STEPS = 128, 256, 8, 2, 512, 4


class Experts(nn.Module):
    """Two matrices for each expert."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        self.up = nn.Parameter(torch.randn(EXPERTS, SIZE, INSIDE) / SIZE**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, INSIDE, SIZE) / INSIDE**0.5)

    def forward(self, hidden: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        return apply_experts(hidden, indices, weights, self.up, self.down)


def apply_experts(hidden: Tensor, indices: Tensor, weights: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Sum the outputs of the experts of each token, times their weights."""
    output = torch.zeros_like(hidden)
    for expert in range(len(up)):
        rows, slots = torch.where(indices == expert)
        inside = (hidden[rows] @ up[expert]).relu() @ down[expert]
        output = output.index_add(0, rows, inside * weights[rows, slots, None])
    return output


class Layer(nn.Module):
    """A router and its experts."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(SIZE, EXPERTS), Experts()

    def forward(self, hidden: Tensor) -> Tensor:
        weights, indices = self.router(hidden).softmax(dim=-1).topk(TOP_K)
        return hidden + self.experts(hidden, indices, weights)


class Layers(nn.Sequential):
    """A model."""

    _no_split_modules = ("Layer",)


def make_parts() -> tuple[Any, Any, Any]:
    """A model, its optimizer, and the batches of this rank; always the same."""
    torch.manual_seed(0)
    model = Layers(Layer(), Layer())
    batches = torch.randn(STEPS, dist.get_world_size(), TOKENS, SIZE)[:, dist.get_rank()]
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3), batches


def exchanging(module: Any, hidden: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
    """The forward of experts, by hand."""
    ranks = dist.get_world_size()
    experts, order = indices.reshape(-1).sort(stable=True)
    counts = torch.bincount(experts, minlength=EXPERTS).view(ranks, -1)
    received_counts = torch.empty_like(counts)
    dist.all_to_all_single(received_counts, counts)
    send, receive = torch.stack([counts.sum(dim=1), received_counts.sum(dim=1)]).tolist()
    rows = hidden[order // TOP_K]
    received = all_to_all_single(rows.new_empty(sum(receive), SIZE), rows, receive, send)
    local = (
        torch.arange(EXPERTS // ranks).repeat(ranks).repeat_interleave(received_counts.reshape(-1))[:, None]
    )
    up, down = module.up.to_local(), module.down.to_local()
    outputs = apply_experts(received, local, torch.ones_like(local, dtype=rows.dtype), up, down)
    returned = all_to_all_single(outputs.new_empty(len(rows), SIZE), outputs, send, receive)
    of_tokens = torch.empty_like(returned).index_copy(0, order, returned).view(*indices.shape, SIZE)
    return (of_tokens * weights.unsqueeze(-1)).sum(dim=1)


def by_hand() -> Any:
    """Plain PyTorch."""
    model, _, batches = make_parts()
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (1, world), mesh_dim_names=("efsdp", "ep"))
    flat = init_device_mesh("cpu", (world,))
    for layer in model:
        for name, parameter in [*layer.experts.named_parameters()]:
            sharded = distribute_tensor(parameter.detach(), mesh["ep"], [Shard(0)], src_data_rank=None)
            layer.experts.register_parameter(name, nn.Parameter(sharded))
        layer.experts.forward = MethodType(exchanging, layer.experts)
        fully_shard(layer.experts, mesh=mesh["efsdp"]).set_gradient_divide_factor(world)
        fully_shard(layer, mesh=flat)
    fully_shard(model, mesh=flat)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)

    def epoch() -> Tensor:
        loss = torch.zeros(())
        for batch in batches:
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    return epoch


def prepared() -> Any:
    """The same through `Accelerator`."""
    world = dist.get_world_size()
    config = ParallelismConfig(dp_shard_size=world, ep_size=world)
    accelerator = Accelerator(cpu=True, parallelism_config=config)
    model, _, batches = make_parts()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    model, optimizer = accelerator.prepare(model, optimizer)

    def epoch() -> Tensor:
        loss = torch.zeros(())
        for batch in batches:
            loss = model(batch).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    return epoch


def main() -> None:
    """Measure, and print the ratio."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=12)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    loops = (prepared(), by_hand())
    compare(loops, rounds=rounds, steps=STEPS, claim=CLAIM)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
