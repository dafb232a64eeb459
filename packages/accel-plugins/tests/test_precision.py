"""Precision policies: loss scaling with several optimizers, refusals, and mixed precision by hand."""

from __future__ import annotations

import logging
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from accel_ops.modules import extract_model_from_parallel
from accel_plugins.kwargs import AutocastKwargs, GradScalerKwargs
from accel_plugins.precision import (
    LossScaling,
    ShardedGradScaler,
    build_precision,
    get_grad_scaler,
    get_mixed_precision_context_manager,
    step_unscaled,
)
from accel_plugins.strategy import Bundle, Strategy
from accel_state.accelerator_state import AcceleratorState
from accel_state.errors import SettingsError, UnsupportedError
from accel_state.runtime import Runtime

CPU = torch.device("cpu")


def strategy_with(policy: Any) -> Strategy:
    return Strategy(cast("Any", None), Runtime(), policy, {})


class Counting(torch.optim.SGD):
    """Counts its steps; takes no closure, as some optimizers do."""

    def __init__(self, parameters: Any, **options: Any) -> None:
        super().__init__(parameters, **options)
        self.steps = 0

    def step(self) -> None:  # type: ignore[override]
        self.steps += 1
        super().step()


def make_pair(scale: float = 1024.0) -> Any:
    policy = build_precision("fp16", CPU, None, GradScalerKwargs(init_scale=scale, growth_interval=1))
    models = [nn.Linear(3, 1, bias=False) for _ in range(2)]
    for model in models:
        nn.init.ones_(model.weight)
    optimizers = [Counting(model.parameters(), lr=1.0) for model in models]
    policy.convert(Bundle(models=models, optimizers=optimizers))
    return policy, models, optimizers


def test_two_optimizers_step_on_gradients_of_one_scale():
    policy, models, optimizers = make_pair()
    loss = sum(model(torch.ones(1, 3)).sum() for model in models)
    policy.scale(loss).backward()
    assert policy.step(optimizers[0])
    assert policy.scaler.get_scale() == 1024.0, "the other gradients still have this scale"
    assert policy.step(optimizers[1])
    assert policy.scaler.get_scale() == 2048.0
    for model in models:
        assert torch.equal(model.weight, torch.zeros(1, 3))


def test_the_scale_is_updated_before_the_next_loss_if_one_optimizer_does_not_step():
    policy, models, optimizers = make_pair()
    for scale in (1024.0, 2048.0):
        assert policy.scaler.get_scale() == scale
        models[0].zero_grad()
        policy.scale(models[0](torch.ones(1, 3)).sum()).backward()
        assert policy.step(optimizers[0])
        assert policy.scaler.get_scale() == scale
        policy.scale(torch.zeros(()))
    assert torch.equal(models[0].weight, torch.full((1, 3), -1.0))


def test_an_overflow_in_one_optimizer_leaves_the_other_its_step():
    policy, models, optimizers = make_pair()
    policy.scale(models[0](torch.ones(1, 3)).sum() * float("inf")).backward()
    policy.scale(models[1](torch.ones(1, 3)).sum()).backward()
    assert not policy.step(optimizers[0])
    assert policy.step(optimizers[1])
    assert [optimizer.steps for optimizer in optimizers] == [0, 1]
    assert policy.scaler.get_scale() == 512.0


def test_training_goes_on_after_a_step_that_was_abandoned_behind_clipping():
    policy, models, optimizers = make_pair()
    policy.scale(models[0](torch.ones(1, 3)).sum()).backward()
    policy.unscale(optimizers[:1])
    policy.scaler.update(policy.scaler.get_scale())
    assert policy.scaler.get_scale() == 1024.0
    optimizers[0].zero_grad()
    policy.scale(models[0](torch.ones(1, 3)).sum()).backward()
    policy.unscale(optimizers[:1])
    assert policy.step(optimizers[0])
    assert torch.equal(models[0].weight, torch.zeros(1, 3))


def test_an_optimizer_without_gradients_steps_as_it_would_in_plain_torch():
    policy, models, optimizers = make_pair()
    assert policy.step(optimizers[0])
    assert torch.equal(models[0].weight, torch.ones(1, 3))


def test_a_state_saved_between_two_steps_has_the_scale_of_the_next():
    policy, models, optimizers = make_pair()
    policy.scale(models[0](torch.ones(1, 3)).sum()).backward()
    policy.step(optimizers[0])
    assert policy.state_dict()["scale"] == 2048.0


def test_clipping_sees_the_true_norm_and_unscales_the_owner_alone():
    policy, models, optimizers = make_pair()
    stepper = strategy_with(policy)
    loss = sum(model(torch.tensor([[2.0, 3.0, 6.0]])).sum() for model in models)
    stepper.backward(loss, accumulation=1, sync=True)
    norm = stepper.clip_grad_norm(models[0].parameters(), 1.0, optimizers=optimizers)
    assert norm == 7.0
    torch.testing.assert_close(models[0].weight.grad, torch.tensor([[2.0, 3.0, 6.0]]) / 7)
    assert torch.equal(models[1].weight.grad, torch.tensor([[2.0, 3.0, 6.0]]) * 1024)
    stepper.clip_grad_value(models[1].weight, 2.5, optimizers=optimizers)
    assert torch.equal(models[1].weight.grad, torch.tensor([[2.0, 2.5, 2.5]]))
    assert stepper.clip_grad_norm(models[0].weight, 1.0, optimizers=optimizers) <= 1.0 + 1e-6
    assert stepper.step(optimizers[0])
    assert stepper.step(optimizers[1])
    assert torch.equal(models[1].weight, torch.tensor([[-1.0, -1.5, -1.5]]))


def test_a_closure_is_refused_under_loss_scaling_only():
    policy, models, optimizers = make_pair()
    policy.scale(models[0](torch.ones(1, 3)).sum()).backward()
    with pytest.raises(UnsupportedError, match=r"Counting.step\(closure\).*'fp16'"):
        policy.step(optimizers[0], lambda: 0.0)
    weight = torch.ones(1, requires_grad=True)
    called: list[float] = []

    def closure() -> float:
        called.append(1.0)
        return 0.0

    assert build_precision("bf16", CPU).step(torch.optim.SGD([weight], lr=1.0), closure)
    assert called == [1.0]


def test_a_scaler_that_is_switched_off_scales_nothing():
    policy = build_precision("fp16", CPU, None, GradScalerKwargs(enabled=False))
    assert policy.scale(torch.tensor(3.0)) == 3.0
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    (model(torch.ones(1, 1)).sum() * float("inf")).backward()
    policy.unscale([optimizer])
    assert policy.step(optimizer)


def test_a_scaler_alone_can_step_an_optimizer():
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    step = LossScaling(scaler).step
    scaler.scale(model(torch.ones(1, 1)).sum() * float("inf")).backward()
    assert not step(optimizer, None)
    assert scaler.get_scale() == 4.0
    assert step_unscaled(optimizer, None)


def test_states_of_other_precisions_are_refused_aloud(caplog: pytest.LogCaptureFixture):
    saved = build_precision("fp16", CPU).state_dict()
    with caplog.at_level(logging.WARNING):
        build_precision("bf16", CPU).load_state_dict(saved)
        build_precision("no", CPU).load_state_dict(saved)
        build_precision("fp16", CPU).load_state_dict({})
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 3
    assert "'bf16'" in caplog.messages[0]
    assert "restarts at 65536" in caplog.messages[2]


@pytest.mark.parametrize(
    ("name", "device", "error", "message"),
    [
        ("bf61", "cpu", SettingsError, r"'bf61': expected one of \['no', 'bf16', 'fp16'\]"),
        ("bf16", "meta", UnsupportedError, "no autocast for devices of type 'meta'"),
    ],
)
def test_what_cannot_be_built_is_named(name: str, device: str, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        build_precision(name, torch.device(device))


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_layers_compute_in_the_low_precision(name: str, dtype: torch.dtype):
    seen: list[torch.dtype] = []
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    build_precision(name, CPU).convert(Bundle(models=[model]))
    assert model(torch.ones(1, 2)).dtype is torch.float32
    assert model[0].weight.dtype is torch.float32
    extract_model_from_parallel(model, keep_fp32_wrapper=False)(torch.ones(1, 2))
    assert seen == [dtype, torch.float32]


def test_the_autocast_of_a_run_can_be_switched_off():
    policy = build_precision("bf16", CPU, AutocastKwargs(enabled=False))
    ones = torch.ones(2, 2)
    with policy.autocast():
        assert (ones @ ones).dtype is torch.float32
    with policy.autocast(AutocastKwargs()):
        assert (ones @ ones).dtype is torch.bfloat16


def test_full_precision_can_switch_off_an_autocast_around_it():
    ones, policy = torch.ones(2, 2), build_precision("no", CPU)
    with torch.autocast("cpu", torch.bfloat16):
        with policy.autocast():
            assert (ones @ ones).dtype is torch.bfloat16
        with policy.autocast(AutocastKwargs(enabled=False)):
            assert (ones @ ones).dtype is torch.float32


def test_a_model_in_mixed_precision_compiles_into_one_graph():
    model = nn.Linear(2, 2)
    build_precision("bf16", CPU).convert(Bundle(models=[model]))
    expected = model(torch.ones(1, 2))
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(compiled(torch.ones(1, 2)), expected)
    assert compiled(torch.ones(1, 2)).dtype is torch.float32


class HostWaits(TorchDispatchMode):
    """Counts how often the host reads a number from a tensor, for which it waits on a device."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("make", "waits"),
    [(lambda p: torch.optim.AdamW(p, fused=True), 0), (lambda p: torch.optim.SGD(p, lr=0.1), 1)],
    ids=["fused", "not fused"],
)
@pytest.mark.parametrize("shared", [False, True])
def test_a_step_waits_for_the_device_no_oftener_than_torchs_own(make, waits, shared):
    policy = build_precision("fp16", CPU, None, GradScalerKwargs(init_scale=8.0), shared=shared)
    model, plain = nn.Linear(3, 1), nn.Linear(3, 1)
    plain.load_state_dict(model.state_dict())
    optimizer, scaler, right = make(model.parameters()), torch.amp.GradScaler("cpu", init_scale=8.0), None
    right = make(plain.parameters())
    policy.convert(Bundle(models=[model], optimizers=[optimizer]))
    policy.scale(model(torch.ones(1, 3)).sum()).backward()
    scaler.scale(plain(torch.ones(1, 3)).sum()).backward()
    with HostWaits() as torch_waits:
        scaler.step(right)
        scaler.update()
    with HostWaits() as ours:
        stepped = policy.step(optimizer)
    assert (ours.number, torch_waits.number) == (waits, waits)
    assert stepped
    assert torch.equal(model.weight, plain.weight)
    assert policy.scaler.state_dict() == scaler.state_dict()


def test_a_fused_optimizer_tells_of_a_skipped_step_when_it_is_asked():
    policy = build_precision("fp16", CPU, None, GradScalerKwargs(init_scale=8.0))
    model = nn.Linear(3, 1)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    before = model.weight.detach().clone()
    policy.scale(model(torch.ones(1, 3)).sum() * float("inf")).backward()
    with HostWaits() as waits:
        stepped = policy.step(optimizer)
        assert waits.number == 0
        assert not stepped
        assert waits.number == 1
    assert torch.equal(model.weight, before)
    assert policy.scaler.get_scale() == 4.0


@pytest.mark.parametrize("end", ["clip", "unscale"])
def test_a_step_that_is_left_out_after_its_gradients_were_unscaled_leaves_the_next_one_right(end):
    policy = build_precision("fp16", CPU, None, GradScalerKwargs(init_scale=1024.0))
    stepper, model = strategy_with(policy), nn.Linear(3, 1, bias=False)
    nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    policy.convert(Bundle(models=[model], optimizers=[optimizer]))
    stepper.backward(model(torch.ones(1, 3)).sum(), accumulation=1, sync=True)
    if end == "clip":
        stepper.clip_grad_norm(model.parameters(), 1e9, optimizers=[optimizer])
    else:
        policy.unscale([optimizer])
    optimizer.zero_grad()
    stepper.backward(model(torch.ones(1, 3)).sum(), accumulation=1, sync=True)
    norm = stepper.clip_grad_norm(model.parameters(), 1e9, optimizers=[optimizer])
    torch.testing.assert_close(norm, torch.tensor(3.0).sqrt())
    assert stepper.step(optimizer)
    assert torch.equal(model.weight, torch.zeros(1, 3))


def test_a_window_that_is_left_out_because_of_infinite_gradients_lowers_the_scale():
    policy, models, optimizers = make_pair()
    policy.scale(models[0](torch.ones(1, 3)).sum() * float("inf")).backward()
    policy.unscale(optimizers)
    optimizers[0].zero_grad()
    policy.scale(models[0](torch.ones(1, 3)).sum()).backward()
    assert policy.scaler.get_scale() == 512.0


def test_gradients_may_be_clipped_before_the_loss_of_another_optimizer_is_scaled():
    policy, models, optimizers = make_pair()
    policy.scale(models[0](torch.ones(1, 3)).sum()).backward()
    policy.unscale(optimizers[:1])
    policy.scale(models[1](torch.ones(1, 3)).sum()).backward()
    for optimizer in optimizers:
        assert policy.step(optimizer)
    for model in models:
        assert torch.equal(model.weight, torch.zeros(1, 3))


@pytest.mark.parametrize("zeroed", [False, True])
def test_scaled_gradients_are_not_added_to_unscaled_ones(zeroed):
    policy, models, optimizers = make_pair()
    policy.scale(models[0](torch.ones(1, 3)).sum()).backward()
    policy.unscale(optimizers[:1])
    if zeroed:
        optimizers[0].zero_grad(set_to_none=False)
    policy.scale(models[0](torch.ones(1, 3)).sum()).backward()
    with pytest.raises(RuntimeError, match=r"Counting were unscaled.*zero_grad\(set_to_none=True\)"):
        policy.step(optimizers[0])


def test_a_second_step_for_one_loss_is_refused_while_others_are_awaited():
    policy, models, optimizers = make_pair()
    policy.scale(models[0](torch.ones(1, 3)).sum()).backward()
    assert policy.step(optimizers[0])
    with pytest.raises(RuntimeError, match=r"Counting.step\(\) was called twice for one loss"):
        policy.step(optimizers[0])


def test_the_dtypes_of_parameters_are_checked_once():
    policy, models, optimizers = make_pair()
    asked: list[str] = []

    def step() -> None:
        for model, optimizer in zip(models, optimizers, strict=True):
            policy.scale(model(torch.ones(1, 3)).sum()).backward()
            policy.step(optimizer)

    class Watched(torch.Tensor):
        @property
        def dtype(self) -> torch.dtype:
            asked.append("dtype")
            return torch.float32

    optimizers[0].param_groups[0]["params"].append(torch.ones(1).as_subclass(Watched))
    step()
    assert asked == ["dtype"]
    step()
    assert asked == ["dtype"]


def product_type() -> torch.dtype:
    return (torch.ones(2, 2) @ torch.ones(2, 2)).dtype


@pytest.mark.parametrize(
    ("native", "enabled", "expected"),
    [(True, True, torch.bfloat16), (True, False, torch.float32), (False, True, torch.float32)],
)
def test_operations_run_in_the_precision_of_the_process(
    native: bool, enabled: bool, expected: torch.dtype
) -> None:
    AcceleratorState(mixed_precision="bf16", cpu=True)
    with get_mixed_precision_context_manager(native, AutocastKwargs(enabled=enabled)):
        assert product_type() is expected


def test_a_scaler_scales_and_shares_whether_gradients_are_finite():
    AcceleratorState(cpu=True)
    scaler = get_grad_scaler(init_scale=8.0)
    assert scaler.scale(torch.ones(1)).item() == 8.0
    assert not isinstance(scaler, ShardedGradScaler)
    assert isinstance(get_grad_scaler("FSDP"), ShardedGradScaler)


def test_a_fused_momentum_begins_with_a_step_and_not_with_uninitialised_memory():
    policy = build_precision("fp16", CPU, None, GradScalerKwargs(init_scale=2.0**10))
    model = nn.Linear(64, 64, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5, fused=True)
    policy.convert(Bundle(models=[model], optimizers=[optimizer]))
    before = model.weight.detach().clone()
    for factor in (torch.inf, 1.0):
        policy.scale(model.weight.sum() * factor).backward()
        stepped = policy.step(optimizer, None)
        assert bool(stepped) == (factor == 1.0)
        assert ("momentum_buffer" in optimizer.state[model.weight]) == (factor == 1.0)
        optimizer.zero_grad()
    assert torch.equal(model.weight, before - 1)
