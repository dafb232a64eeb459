"""Every precision policy computes like float32 within its digits, and scales nothing that a user sees."""

from __future__ import annotations

import copy
from typing import Any, cast

import pytest
import torch
from torch import nn

from accel_ops.modules import extract_model_from_parallel
from accel_plugins.kwargs import AutocastKwargs
from accel_plugins.precision import PrecisionPolicy, build_precision
from accel_plugins.strategy import Bundle

TOLERANCE: Any = {"rtol": 0.0, "atol": 0.05}  # bfloat16 has eight significant bits


@pytest.fixture(params=["cpu", pytest.param("accelerator", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    if request.param == "cpu":
        return torch.device("cpu")
    return torch.device(cast("Any", torch.accelerator.current_accelerator()).type, 0)


@pytest.fixture(params=["no", "bf16", "fp16"])
def policy(request: pytest.FixtureRequest, device: torch.device) -> PrecisionPolicy:
    return build_precision(request.param, device)


def network(device: torch.device) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).to(device)


def prepared(policy: PrecisionPolicy, device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = network(device)
    bundle = policy.convert(Bundle(models=[model], optimizers=[torch.optim.SGD(model.parameters(), lr=0.5)]))
    return bundle.models[0], bundle.optimizers[0]


def loss_of(model: nn.Module, device: torch.device, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    inputs, targets = (torch.randn(12, size, generator=generator).to(device) for size in (6, 3))
    return nn.functional.mse_loss(model(inputs), targets)


def test_converted_models_return_float32(policy: PrecisionPolicy, device: torch.device):
    model, plain = prepared(policy, device)[0], network(device)
    inputs = torch.ones(2, 6, device=device)
    torch.testing.assert_close(model(inputs), plain(inputs), **TOLERANCE)
    assert [*model.state_dict()] == [*plain.state_dict()]


def test_conversion_can_be_undone(policy: PrecisionPolicy, device: torch.device):
    model, _ = prepared(policy, device)
    policy.convert(Bundle(models=[model]))
    plain = extract_model_from_parallel(model, keep_fp32_wrapper=False)
    assert plain is model
    assert "forward" not in vars(plain)
    inputs = torch.ones(2, 6, device=device)
    assert torch.equal(plain(inputs), network(device)(inputs))


def test_copies_use_their_own_parameters(policy: PrecisionPolicy, device: torch.device):
    model, inputs = prepared(policy, device)[0], torch.ones(2, 6, device=device)
    before, twin = model(inputs), copy.deepcopy(model)
    for parameter in twin.parameters():
        nn.init.zeros_(parameter)
    assert not twin(inputs).any()
    assert torch.equal(model(inputs), before)


def test_autocast_can_be_switched_off(policy: PrecisionPolicy, device: torch.device):
    ones = torch.ones(2, 2, device=device)
    with policy.autocast(AutocastKwargs(enabled=False)):
        assert (ones @ ones).dtype is torch.float32


def test_unscaled_gradients_are_those_of_the_loss(policy: PrecisionPolicy, device: torch.device):
    model, optimizer = prepared(policy, device)
    plain = network(device)
    policy.scale(loss_of(model, device)).backward()
    policy.unscale([optimizer])
    policy.unscale([optimizer])
    loss_of(plain, device).backward()
    for parameter, right in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, right.grad, **TOLERANCE)


def test_steps_are_those_of_the_loss(policy: PrecisionPolicy, device: torch.device):
    model, optimizer = prepared(policy, device)
    plain = network(device)
    right = torch.optim.SGD(plain.parameters(), lr=0.5)
    for seed in range(2):
        optimizer.zero_grad()
        policy.scale(loss_of(model, device, seed)).backward()
        assert policy.step(optimizer)
        right.zero_grad()
        loss_of(plain, device, seed).backward()
        right.step()
    for parameter, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter, wanted, **TOLERANCE)


def test_a_step_with_infinite_gradients_is_skipped_and_its_scale_resumed(device: torch.device):
    policy, other = build_precision("fp16", device), build_precision("fp16", device)
    model, optimizer = prepared(policy, device)
    scale, before = cast("Any", policy.scaler).get_scale(), copy.deepcopy(model.state_dict())
    policy.scale(loss_of(model, device) * float("inf")).backward()
    assert not policy.step(optimizer)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert cast("Any", policy.scaler).get_scale() < scale
    other.load_state_dict(policy.state_dict())
    assert other.state_dict() == policy.state_dict() != {}


@pytest.mark.parametrize("name", ["no", "bf16"])
def test_a_policy_without_loss_scaling_has_no_state(name: str):
    policy = build_precision(name, torch.device("cpu"))
    assert policy.scaler is None
    assert policy.state_dict() == {}
