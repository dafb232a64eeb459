"""Optimizers that know shards: updates of one process, uneven and empty shards, experts, checkpoints."""

from __future__ import annotations

import itertools
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils.data import DataLoader, TensorDataset

from accel_plugins.fsdp.plugin import FullyShardedDataParallelPlugin
from accel_plugins.optimizers.host_adamw import HostAdamW
from accel_plugins.optimizers.muon import Muon
from accel_plugins.parallelism.config import ParallelismConfig
from accel_plugins.sharding.shards import shard_like
from accel_state.accelerator_state import AcceleratorState
from accel_state.errors import SettingsError
from accel_train import Accelerator
from harness import distributed

IN, HIDDEN, EXPERTS, ROWS = 6, 10, 3, 16


class Model(nn.Module):
    """Matrices that no number of ranks divides, a stack of experts, and what AdamW trains."""

    tp_plan: ClassVar = {"up": "colwise", "down": "rowwise"}

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(IN, HIDDEN), nn.Linear(HIDDEN, IN)
        self.gate = nn.Linear(IN, EXPERTS, bias=False)
        self.experts = nn.Parameter(torch.randn(EXPERTS, IN, 5) / 3)
        self.narrow = nn.Linear(IN, 1)  # one row: shards are empty on all ranks but one
        self.norm = nn.LayerNorm(IN)

    def forward(self, x):
        x = x + self.down(torch.tanh(self.up(self.norm(x))))
        weights = self.gate(x).softmax(-1)
        mixed = torch.einsum("bi,eij,be->bj", x, self.experts, weights)
        return self.narrow(x) + mixed.sum(-1, keepdim=True)


def make_muon(model):
    return Muon(model, lr=0.05, momentum=0.9, adamw={"lr": 0.01, "eps": 1e-3})


def rows():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(ROWS, IN, generator=generator), torch.randn(ROWS, 1, generator=generator)


LAYOUTS = {
    "ddp": {},
    "fsdp2": {"dp_shard_size": -1},
    "tp": {"tp_size": 2},
    "hsdp": {"dp_replicate_size": 2, "dp_shard_size": 2},
    "fsdp2 x tp": {"dp_shard_size": 2, "tp_size": 2},
}
CASES = {2: ["ddp", "fsdp2", "tp"], 4: ["ddp", "fsdp2", "hsdp", "fsdp2 x tp"]}


def make_accelerator(layout, **options):
    AcceleratorState._reset_state(True)
    sizes = {axis: dist.get_world_size() if size < 0 else size for axis, size in LAYOUTS[layout].items()}
    if "dp_shard_size" in sizes:
        options["fsdp_plugin"] = FullyShardedDataParallelPlugin(fsdp_version=2)
    if sizes:
        options["parallelism_config"] = ParallelismConfig(**sizes)
    return Accelerator(cpu=True, **options)


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def same_gradients(model, seed):
    """Give each parameter the shard of one gradient, the same on all ranks and in one process."""
    for name, parameter in sorted(model.named_parameters()):
        generator = torch.Generator().manual_seed(seed + sum(map(ord, name)))
        gradient = torch.randn(parameter.shape, generator=generator)
        if isinstance(parameter, DTensor):
            gradient = shard_like(gradient, parameter)
        parameter.grad = gradient


def check_updates(layout):
    """Updates of the same gradients: to 1e-6 those of torch.optim.Muon and AdamW on whole matrices."""
    accelerator = make_accelerator(layout)
    model, alone = Model(), Model()
    matrices = [alone.up.weight, alone.down.weight, alone.gate.weight, alone.narrow.weight]
    experts = [nn.Parameter(expert.clone()) for expert in alone.experts.detach()]
    known = {*map(id, matrices), id(alone.experts)}
    muon = torch.optim.Muon([*matrices, *experts], lr=0.05, momentum=0.9)
    adamw = torch.optim.AdamW([p for p in alone.parameters() if id(p) not in known], lr=0.01, eps=1e-3)
    optimizer = make_muon(model)
    model, optimizer = accelerator.prepare(model, optimizer)
    inner = accelerator.unwrap_model(model)
    for seed in range(3):
        same_gradients(inner, seed)
        same_gradients(alone, seed)
        for expert, gradient in zip(experts, alone.experts.grad, strict=True):
            expert.grad = gradient
        optimizer.step()
        muon.step()
        adamw.step()
    with torch.no_grad():
        alone.experts.copy_(torch.stack([*experts]))
    now = {name: full(parameter) for name, parameter in inner.named_parameters()}
    for name, parameter in alone.named_parameters():
        torch.testing.assert_close(now[name], parameter.detach(), rtol=0, atol=1e-6, msg=name)
    momenta = [full(values["momentum_buffer"]) for values in optimizer.state.values() if len(values) == 1]
    expected = [muon.state[matrix]["momentum_buffer"] for matrix in matrices]
    assert sum(any(torch.equal(m, e) for e in expected if m.shape == e.shape) for m in momenta) == 4


@pytest.mark.parametrize("layout", CASES[2])
@distributed(world_size=2)
def test_updates_on_two_ranks_are_those_of_whole_matrices(layout):
    check_updates(layout)


@pytest.mark.parametrize("layout", CASES[4])
@distributed(world_size=4)
def test_updates_on_four_ranks_are_those_of_whole_matrices(layout):
    check_updates(layout)


PLACEMENTS = [*itertools.combinations_with_replacement([Shard(0), Shard(1), Shard(2), Replicate()], 2)]


@distributed(world_size=4)
def test_a_stack_of_matrices_may_be_sharded_in_any_way():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    for shape, placements in itertools.product([(3, 5, 7), (5, 3, 4), (1, 4, 4)], PLACEMENTS):
        torch.manual_seed(2)
        value, gradient = torch.randn(2, *shape)
        alone = nn.Parameter(value.clone())
        alone.grad = gradient
        parameter = nn.Parameter(distribute_tensor(value, mesh, placements))
        parameter.grad = distribute_tensor(gradient, mesh, placements)
        for optimizer in (Muon([alone], lr=0.1), Muon([parameter], lr=0.1)):
            optimizer.step()
        torch.testing.assert_close(full(parameter), alone.detach(), rtol=0, atol=1e-6, msg=f"{placements}")


def train(accelerator, make_optimizer, *, steps=2, window=2, model=None, optimizer=None, max_norm=0.5):
    """Train with accumulation, clipping and a schedule; every micro-batch is an eighth of the rows."""
    shards = accelerator.num_processes if accelerator.num_processes == 1 else num_shards(accelerator)
    model = Model() if model is None else model
    optimizer = make_optimizer(model) if optimizer is None else optimizer
    loader = DataLoader(TensorDataset(*rows()), batch_size=ROWS // (steps * window) // shards)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    losses = []
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
            if accelerator.sync_gradients and max_norm is not None:
                accelerator.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    return model, optimizer, losses


def num_shards(accelerator):
    return accelerator._parts.strategy.sharding.num_shards


def train_alone(make_optimizer, *, steps=2, window=2, max_norm=0.5, **_):
    """The same in one process, by plain PyTorch."""
    model = Model()
    optimizer = make_optimizer(model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    parts = [*zip(*(tensor.split(ROWS // (steps * window)) for tensor in rows()), strict=True)]
    losses = []
    for index, (x, y) in enumerate(parts):
        loss = nn.functional.mse_loss(model(x), y)
        (loss / window).backward()
        losses.append(loss.item())
        if (index + 1) % window == 0:
            if max_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    return model, optimizer, losses


def check_training(layout, make_optimizer, atol, folder, *others, make_alone=None):
    """Train as in one process; then resume in the same run, and under other strategies, with equal state."""
    options = {"gradient_accumulation_steps": 2, "step_scheduler_per": "update"}
    accelerator = make_accelerator(layout, **options)
    model, optimizer, losses = train(accelerator, make_optimizer)
    alone, _, expected = train_alone(make_alone or make_optimizer)
    torch.testing.assert_close(losses, expected, rtol=1e-3, atol=atol)
    weights = accelerator.get_state_dict(model)
    for name, value in alone.state_dict().items():
        if accelerator.is_main_process:
            torch.testing.assert_close(weights[name], value, rtol=0, atol=atol, msg=name)
    accelerator.save_state(folder, flush=False)
    saved = full_states(accelerator, model, optimizer)
    for other in (layout, *others):
        accelerator = make_accelerator(other, **options)
        torch.manual_seed(7)
        model = Model()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_()
        model, optimizer, _ = accelerator.prepare(
            model, make_optimizer(model), DataLoader(TensorDataset(*rows()), batch_size=4)
        )
        accelerator.load_state(folder)
        loaded = full_states(accelerator, model, optimizer)
        assert {key for key in saved if not torch.equal(saved[key], loaded[key])} == set(), other
        assert saved.keys() == loaded.keys()


def full_states(accelerator, model, optimizer):
    """Return each parameter's value and state, by name, all-gathered."""
    inner = accelerator.unwrap_model(model)
    states = {}
    for name, parameter in inner.named_parameters():
        states[name] = full(parameter).clone()
        for key, value in optimizer.state[parameter].items():
            states[f"{name} {key}"] = full(value).clone()
    return states


@distributed(world_size=2)
def test_muon_trains_on_two_ranks_and_resumes_under_other_strategies(tmp_path):
    check_training("fsdp2", make_muon, 2e-3, tmp_path, "ddp", "tp")


@distributed(world_size=4)
def test_muon_trains_on_four_ranks_and_resumes_under_other_strategies(tmp_path):
    check_training("hsdp", make_muon, 2e-3, tmp_path, "fsdp2", "fsdp2 x tp", "ddp")


@distributed(world_size=2)
def test_muon_is_refused_under_fsdp1():
    AcceleratorState._reset_state(True)
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=1))
    model = Model()
    with pytest.raises(SettingsError, match="Muon computes the update of an element from others"):
        accelerator.prepare(model, make_muon(model))


ADAMW = {"lr": 0.01, "eps": 1e-3}


def make_host_adamw(model):
    return HostAdamW(model.parameters(), **ADAMW)


def make_adamw(model):
    return torch.optim.AdamW(model.parameters(), **ADAMW)


@distributed(world_size=2)
def test_adamw_on_the_host_trains_on_two_ranks_and_resumes_under_other_strategies(tmp_path):
    check_training("fsdp2", make_host_adamw, 1e-5, tmp_path, "ddp", "tp", make_alone=make_adamw)


@distributed(world_size=4)
def test_adamw_on_the_host_trains_on_four_ranks_and_resumes_under_other_strategies(tmp_path):
    check_training("hsdp", make_host_adamw, 1e-5, tmp_path, "fsdp2", "fsdp2 x tp", make_alone=make_adamw)


@pytest.mark.parametrize("layout", CASES[2])
@distributed(world_size=2)
def test_parameters_in_bfloat16_are_rounded_master_weights(layout):
    """Without accumulation and clipping: sharded parameters are stepped in the backward pass."""
    accelerator = make_accelerator(layout)
    model, alone = Model().bfloat16(), Model().bfloat16()
    masters = [nn.Parameter(parameter.detach().float()) for parameter in alone.parameters()]
    adamw = torch.optim.AdamW(masters, **ADAMW)
    model, optimizer = accelerator.prepare(model, make_host_adamw(model))
    inner = accelerator.unwrap_model(model)
    x, y = rows()
    shard = slice(num_shards_index(accelerator), None, num_shards(accelerator))
    for step in range(3):
        before = full(inner.up.weight).clone()
        loss = nn.functional.mse_loss(model(x[shard].bfloat16()).float(), y[shard])
        accelerator.backward(loss)
        gradients = [full(parameter.grad).float() for parameter in inner.parameters()]
        during = not torch.equal(full(inner.up.weight), before)
        optimizer.step()
        assert not torch.equal(full(inner.up.weight), before)
        if layout == "ddp" or step == 0:  # the reducer's gradients are not final in the backward pass
            assert not during
        for master, gradient in zip(masters, gradients, strict=True):
            master.grad = gradient
        adamw.step()
        optimizer.zero_grad()
    for parameter, master in zip(inner.parameters(), masters, strict=True):
        kept = full(optimizer.state[parameter]["master"])
        torch.testing.assert_close(kept, master.detach(), rtol=1e-6, atol=1e-7)
        assert torch.equal(full(parameter), kept.bfloat16())


def num_shards_index(accelerator):
    return accelerator._parts.strategy.sharding.shard_index


@distributed(world_size=2)
def test_steps_of_shards_begin_in_the_backward_pass():
    accelerator = make_accelerator("fsdp2")
    model = Model()
    optimizer = make_host_adamw(model)
    model, prepared = accelerator.prepare(model, optimizer)
    x, y = rows()
    for step in range(2):
        accelerator.backward(nn.functional.mse_loss(model(x), y))
        if step == 1:
            with pytest.raises(RuntimeError, match="started in the backward pass"):
                prepared.state_dict()
        prepared.step()
        prepared.zero_grad()


@distributed(world_size=2)
def test_adamw_on_the_host_is_refused_under_fsdp1():
    AcceleratorState._reset_state(True)
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=1))
    model = Model()
    with pytest.raises(SettingsError, match="has a hook"):
        accelerator.prepare(model, make_host_adamw(model))
