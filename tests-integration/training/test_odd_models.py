"""Unusual models, optimizers and hooks on several ranks: the numbers of one process, or a sentence."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from accel_plugins.fsdp.plugin import FullyShardedDataParallelPlugin
from accel_plugins.parallelism.config import ParallelismConfig
from accel_state.errors import SettingsError
from accel_train import Accelerator
from harness import distributed

ROWS = torch.randn(12, 4, generator=torch.Generator().manual_seed(3))
SIZE_BASED = {"auto_wrap_policy": "size_based_wrap", "min_num_params": 1}


def make_accelerator(strategy, *, mixed_precision=None, **plugin):
    options = {}
    if strategy.startswith("fsdp"):
        options["fsdp_plugin"] = FullyShardedDataParallelPlugin(fsdp_version=int(strategy[-1]), **plugin)
    if strategy == "tp":
        options["parallelism_config"] = ParallelismConfig(tp_size=dist.get_world_size())
    return Accelerator(cpu=True, mixed_precision=mixed_precision, **options)


def make_model(hidden=6):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, hidden), nn.Tanh(), nn.Linear(hidden, 2))
    model.tp_plan = {"0": "colwise", "2": "rowwise"}
    return model


def rows_of(accelerator, rows=ROWS):
    """This rank's rows: all of them where ranks share batches."""
    sharding = accelerator._parts.strategy.sharding
    return rows.chunk(sharding.num_shards)[sharding.shard_index]


def loss_of(model, rows):
    return model(rows).square().mean()


def full_state(accelerator, model):
    return accelerator._parts.strategy.persister.full_state_dict(model)


def train(accelerator, model, optimizer, *, steps=3, loss=loss_of):
    rows = rows_of(accelerator)
    for _ in range(steps):
        optimizer.zero_grad()
        accelerator.backward(loss(model, rows))
        optimizer.step()
    return full_state(accelerator, model)


def train_alone(model, optimizer, *, steps=3, loss=loss_of):
    for _ in range(steps):
        optimizer.zero_grad()
        loss(model, ROWS).backward()
        optimizer.step()
    return model.state_dict()


def assert_close(actual, expected, tolerance=1e-6):
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, rtol=0, atol=tolerance, msg=name)


@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
@pytest.mark.parametrize("strategy", ["fsdp1", "fsdp2"])
@distributed(world_size=2)
def test_clipping_counts_all_models_and_what_belongs_to_none(strategy, norm_type):
    accelerator = make_accelerator(strategy)
    models, alone = ([make_model(), make_model(hidden=5)] for _ in range(2))
    extra, extra_alone = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([*models[0].parameters(), *models[1].parameters()], lr=0.1)
    first, second, optimizer = accelerator.prepare(*models, optimizer)
    rows = rows_of(accelerator)
    accelerator.backward(loss_of(first, rows) + 9 * loss_of(second, rows))
    (loss_of(alone[0], ROWS) + 9 * loss_of(alone[1], ROWS)).backward()
    extra.grad, extra_alone.grad = torch.ones(3), torch.ones(3)
    norm = accelerator.clip_grad_norm_([*second.parameters(), extra, *first.parameters()], 0.1, norm_type)
    every = [*alone[1].parameters(), extra_alone, *alone[0].parameters()]
    assert norm.item() == pytest.approx(nn.utils.clip_grad_norm_(every, 0.1, norm_type).item(), rel=1e-5)
    optimizer.step()
    torch.optim.SGD([p for p in every if p is not extra_alone], lr=0.1).step()
    for model, expected in zip((first, second), alone, strict=True):
        assert_close(full_state(accelerator, model), expected.state_dict())
    torch.testing.assert_close(extra.grad, extra_alone.grad)


def double(parameter):
    parameter.grad.mul_(2)


@pytest.mark.parametrize("strategy", ["fsdp2", "tp"])
@distributed(world_size=2)
def test_hooks_on_parameters_are_called_and_can_be_removed(strategy):
    model, alone = make_model(), make_model()
    for each in (model, alone):
        each[0].weight.register_post_accumulate_grad_hook(double)
        if strategy == "tp":  # which computes with the parameters themselves
            each[0].bias.register_hook(lambda gradient: gradient * 3)
            each[2].bias.register_hook(lambda gradient: gradient * 3)
    handle = model[2].weight.register_post_accumulate_grad_hook(double)
    accelerator = make_accelerator(strategy)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    handle.remove()
    trained = train(accelerator, model, optimizer)
    assert_close(trained, train_alone(alone, torch.optim.SGD(alone.parameters(), lr=0.1)))


@pytest.mark.parametrize(
    ("strategy", "method"),
    [
        ("fsdp1", "register_hook"),
        ("fsdp1", "register_post_accumulate_grad_hook"),
        ("fsdp2", "register_hook"),
    ],
)
@distributed(world_size=2)
def test_hooks_that_would_never_be_called_are_refused_by_their_parameter(strategy, method):
    model = make_model()
    handle = getattr(model[2].bias, method)(double)
    accelerator = make_accelerator(strategy)
    with pytest.raises(SettingsError, match=rf"'2.bias' has a hook \({method}\), which FSDP. would never"):
        accelerator.prepare(model)
    handle.remove()
    accelerator.prepare(model)


@distributed(world_size=2)
def test_optimizers_that_mix_elements_are_refused_where_shards_are_flat():
    accelerator = make_accelerator("fsdp1")
    for make in (torch.optim.LBFGS, torch.optim.Adafactor):
        model = make_model()
        with pytest.raises(SettingsError, match=rf"{make.__name__} computes the update of an element from"):
            accelerator.prepare(model, make(model.parameters()))
    model, alone = make_model(), make_model()
    accelerator = make_accelerator("fsdp1", sharding_strategy="NO_SHARD")
    model, optimizer = accelerator.prepare(model, torch.optim.Adafactor(model.parameters()))
    trained = train(accelerator, model, optimizer)
    assert_close(trained, train_alone(alone, torch.optim.Adafactor(alone.parameters())))


@pytest.mark.parametrize("order", ["together", "model first", "optimizer made last"])
@pytest.mark.parametrize("make", [torch.optim.Adagrad, torch.optim.AdamW])
@pytest.mark.parametrize("strategy", ["fsdp1", "fsdp2", "tp"])
@distributed(world_size=2)
def test_state_from_before_prepare_is_sharded(strategy, make, order):
    model = make_model(hidden=6 if strategy == "tp" else 5)
    alone = copy.deepcopy(model)
    optimizer, expected = (make(each.parameters(), lr=0.1) for each in (model, alone))
    if order != "optimizer made last":
        for each, stepped in ((model, optimizer), (alone, expected)):
            loss_of(each, ROWS).backward()
            stepped.step()
    accelerator = make_accelerator(strategy)
    if order == "together":
        model, optimizer = accelerator.prepare(model, optimizer)
    else:
        model = accelerator.prepare(model)
        if order == "optimizer made last":
            optimizer = make(model.parameters(), lr=0.1)
        optimizer = accelerator.prepare(optimizer)
    assert_close(train(accelerator, model, optimizer), train_alone(alone, expected), tolerance=1e-5)


@distributed(world_size=2)
def test_state_from_before_prepare_is_refused_where_parameters_become_one():
    accelerator = make_accelerator("fsdp1", use_orig_params=False, **SIZE_BASED)
    model = make_model()
    early = torch.optim.Adagrad(model.parameters(), lr=0.1)
    text = r"Adagrad has state of parameters of which FSDP1 makes flat ones.*use_orig_params=True"
    with pytest.raises(SettingsError, match=text):
        accelerator.prepare(model, early)
    model = accelerator.prepare(model)
    with pytest.raises(SettingsError, match=text):
        accelerator.prepare(early)
    alone = make_model()
    optimizer = accelerator.prepare(torch.optim.Adagrad(model.parameters(), lr=0.1))
    expected = torch.optim.Adagrad(alone.parameters(), lr=0.1)
    assert_close(train(accelerator, model, optimizer), train_alone(alone, expected))
