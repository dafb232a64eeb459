"""AdamW with its state on the host: updates of AdamW, steps that begin in the backward pass, late copies."""

from __future__ import annotations

import copy
import multiprocessing
import pickle
import time
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from accel_plugins.optimizers.host_adamw import HostAdamW
from accel_plugins.precision import LossScaling
from accel_state.accelerator_state import GradientState
from accel_state.streams import device_streams

OPTIONS = {"lr": 0.05, "betas": (0.8, 0.9), "eps": 1e-3, "weight_decay": 0.1}


def make_model(dtype=torch.bfloat16):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 10), nn.Tanh(), nn.Linear(10, 4)).to(
        dtype
    )


def inputs(seed):
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(seed))


def backward(model, seed):
    dtype = next(model.parameters()).dtype
    model(inputs(seed).to(next(model.parameters()).device, dtype)).float().square().mean().backward()


class Reference:
    """The same by torch.optim.AdamW: float32 master weights, rounded into the model after each step."""

    def __init__(self, model, **options):
        self.model = model
        self.masters = [nn.Parameter(p.detach().float().clone()) for p in model.parameters()]
        self.adamw = torch.optim.AdamW(self.masters, **options)

    @torch.no_grad()
    def step(self):
        for master, parameter in zip(self.masters, self.model.parameters(), strict=True):
            master.grad = parameter.grad.float()
        self.adamw.step()
        for master, parameter in zip(self.masters, self.model.parameters(), strict=True):
            parameter.copy_(master)


def check_equal(model, optimizer, reference):
    for parameter, master in zip(model.parameters(), reference.masters, strict=True):
        kept = optimizer.state[parameter]["master"]
        torch.testing.assert_close(kept, master.detach(), rtol=1e-6, atol=1e-7)
        assert torch.equal(parameter, kept.to(parameter.dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("clips", [True, False])
def test_updates_are_those_of_adamw_with_master_weights(dtype, overlap, clips):
    model, other = make_model(dtype), make_model(dtype)
    optimizer, reference = (
        HostAdamW(model.parameters(), **OPTIONS, overlap=overlap),
        Reference(other, **OPTIONS),
    )
    schedules = [torch.optim.lr_scheduler.StepLR(o, 1, gamma=0.7) for o in (optimizer, reference.adamw)]
    for seed in range(4):
        for each in (model, other):
            each.zero_grad()
            backward(each, seed)
            if clips:
                nn.utils.clip_grad_norm_(each.parameters(), 0.01)
        optimizer.step()
        reference.step()
        optimizer.zero_grad()
        for schedule in schedules:
            schedule.step()
        check_equal(model, optimizer, reference)


def eventually(condition):
    while not condition():
        time.sleep(0.01)
    return True


def test_scaled_losses_give_the_updates_of_plain_ones_and_an_overflow_gives_none():
    scaling = LossScaling(torch.amp.GradScaler("cpu", init_scale=2.0**10))
    model, other = make_model(torch.float32), make_model(torch.float32)
    optimizer, reference = HostAdamW(model.parameters(), **OPTIONS), Reference(other, **OPTIONS)
    for seed in range(5):
        loss = model(inputs(seed)).square().mean()
        scaling.scale(loss * (float("inf") if seed == 2 else 1)).backward()
        assert bool(scaling.step(optimizer)) == (seed != 2)
        optimizer.zero_grad()
        if seed != 2:
            backward(other, seed)
            reference.step()
            other.zero_grad()
        check_equal(model, optimizer, reference)


def test_from_the_second_step_on_the_backward_pass_steps():
    model = make_model()
    optimizer = HostAdamW(model.parameters(), **OPTIONS)
    last = model[4].weight
    before = last.detach().clone()
    backward(model, 0)
    assert torch.equal(last, before), "the first step finds out whether gradients are changed"
    optimizer.step()
    optimizer.zero_grad()
    before = last.detach().clone()
    stepped_during_backward = []
    model[1].register_full_backward_hook(
        lambda *_: stepped_during_backward.append(eventually(lambda: not torch.equal(last, before)))
    )
    backward(model, 1)
    assert stepped_during_backward == [True]
    optimizer.step()


def test_steps_wait_for_the_last_micro_batch():
    model, other = make_model(), make_model()
    optimizer, reference = HostAdamW(model.parameters(), **OPTIONS), Reference(other, **OPTIONS)
    state = GradientState()
    for step in range(3):
        for micro_batch in range(2):
            state.sync_gradients = micro_batch == 1
            before = model[4].weight.detach().clone()
            for each in (model, other):
                backward(each, 2 * step + micro_batch)
            if micro_batch == 0:
                assert torch.equal(model[4].weight, before)
        optimizer.step()
        reference.step()
        optimizer.zero_grad()
        other.zero_grad()
    check_equal(model, optimizer, reference)


def test_two_backward_passes_in_plain_torch_are_two_micro_batches():
    model, other = make_model(), make_model()
    optimizer, reference = HostAdamW(model.parameters(), **OPTIONS), Reference(other, **OPTIONS)
    for step in range(2):
        for each in (model, other):
            each.zero_grad()
            backward(each, 2 * step)
            backward(each, 2 * step + 1)
        optimizer.step()
        reference.step()
    check_equal(model, optimizer, reference)


def begun():
    model = make_model()
    optimizer = HostAdamW(model.parameters(), **OPTIONS)
    backward(model, 0)
    optimizer.step()
    optimizer.zero_grad()
    versions = {parameter: parameter._version for parameter in model.parameters()}
    backward(model, 1)
    # A forward pass whose weights the thread still changes would fail in autograd instead.
    while any(parameter._version == version for parameter, version in versions.items()):
        time.sleep(0.001)
    return model, optimizer


def test_what_comes_after_a_step_has_begun_is_an_error_that_says_how_to_have_it():
    way_out = r"Pass HostAdamW\(overlap=False\)"
    model, optimizer = begun()
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    with pytest.raises(RuntimeError, match=f"gradient was changed after backward.*{way_out}"):
        optimizer.step()
    model, optimizer = begun()
    optimizer.param_groups[0]["lr"] = 0.5
    with pytest.raises(RuntimeError, match=f"learning rate was changed.*{way_out}"):
        optimizer.step()
    model, optimizer = begun()
    with pytest.raises(RuntimeError, match=f"without step.*{way_out}"):
        optimizer.zero_grad()
    with pytest.raises(RuntimeError, match=f"state_dict.*{way_out}"):
        optimizer.state_dict()
    with pytest.raises(RuntimeError, match=f"twice before step.*{way_out}"):
        backward(model, 2)


@pytest.mark.parametrize("copied", ["state dict", "deepcopy", "pickle"])
def test_training_goes_on_from_a_copy(copied):
    model = make_model()
    optimizer = HostAdamW(model.parameters(), **OPTIONS)
    backward(model, 0)
    optimizer.step()
    if copied == "pickle":
        again, other = pickle.loads(pickle.dumps((model, optimizer)))
    elif copied == "deepcopy":
        again, other = copy.deepcopy((model, optimizer))
    else:
        again = copy.deepcopy(model)
        other = HostAdamW(again.parameters(), lr=1.0)
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for one, its in ((model, optimizer), (again, other)):
        one.zero_grad()
        backward(one, 1)
        its.step()
    for parameter, same in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(parameter, same)
        assert torch.equal(optimizer.state[parameter]["master"], other.state[same]["master"])
    assert other.state[same]["exp_avg"].dtype == torch.float32


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_training_goes_on_in_a_forked_child():
    model = nn.Linear(2, 2)
    optimizer = HostAdamW(model.parameters())

    def step():
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    child = multiprocessing.get_context("fork").Process(target=step, daemon=True)
    child.start()
    child.join()
    assert child.exitcode == 0


def test_the_state_of_adamw_loads_and_its_weights_are_the_models():
    model = make_model(torch.float32)
    adamw = torch.optim.AdamW(model.parameters(), **OPTIONS)
    backward(model, 0)
    adamw.step()
    again = copy.deepcopy(model)
    optimizer = HostAdamW(again.parameters(), **OPTIONS)
    optimizer.load_state_dict(copy.deepcopy(adamw.state_dict()))
    for one, its in ((model, adamw), (again, optimizer)):
        one.zero_grad()
        backward(one, 1)
        its.step()
    for parameter, same in zip(model.parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(parameter, same, rtol=1e-6, atol=1e-7)


def test_master_weights_follow_a_model_that_was_loaded_and_keep_equal_ones():
    model = make_model()
    optimizer = HostAdamW(model.parameters(), **OPTIONS)
    backward(model, 0)
    optimizer.step()
    master = optimizer.state[model[0].bias]["master"]
    kept = master[1].item()
    with torch.no_grad():
        model[0].bias[0] = 8.0
    model.zero_grad()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
        optimizer.state[parameter]["exp_avg"].zero_()
    optimizer.step()
    decayed = 1 - OPTIONS["lr"] * OPTIONS["weight_decay"]
    assert master[0].item() == pytest.approx(8.0 * decayed)
    assert master[1].item() == pytest.approx(kept * decayed)


@pytest.mark.gpu
@pytest.mark.parametrize("is_pinned", [True, False])
@pytest.mark.parametrize("overlap", [True, False])
def test_copies_to_and_from_a_device_are_ordered(simulated, is_pinned, overlap):
    """The model has a stream of its own; without overlap, its gradients are not contiguous."""
    other = make_model()
    reference = Reference(other, **OPTIONS)
    for seed in range(4):
        backward(other, seed)
        reference.step()
        other.zero_grad()
    streams = device_streams(torch.device(simulated.NAME, 0))
    limit = nullcontext() if is_pinned else simulated.pinned_capacity(0)
    with limit, streams.on(streams.new_stream()):
        model = make_model().to(streams.device)
        optimizer = HostAdamW(model.parameters(), **OPTIONS, overlap=overlap)
        for seed in range(4):
            backward(model, seed)
            for parameter in model.parameters() if not overlap else ():
                parameter.grad = parameter.grad.t().contiguous().t()
            optimizer.step()
            optimizer.zero_grad()
        values = [parameter.detach().cpu() for parameter in model.parameters()]
    for value, master in zip(values, reference.masters, strict=True):
        assert torch.equal(value, master.to(value.dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("clips", [True, False])
def test_updates_on_a_gpu_are_those_of_adamw_with_master_weights(clips):
    device = torch.accelerator.current_accelerator()
    model = make_model().to(device)
    other = copy.deepcopy(model)
    optimizer, reference = HostAdamW(model.parameters(), **OPTIONS), Reference(other, **OPTIONS)
    for seed in range(5):
        for each in (model, other):
            each(inputs(seed).to(device).bfloat16()).float().square().mean().backward()
            if clips:
                nn.utils.clip_grad_norm_(each.parameters(), 0.01)
        optimizer.step()
        reference.step()
        optimizer.zero_grad()
        other.zero_grad()
    for parameter, master in zip(model.parameters(), reference.masters, strict=True):
        state = optimizer.state[parameter]
        assert {value.device.type for value in state.values()} == {"cpu"}
        torch.testing.assert_close(state["master"], master.detach().cpu(), rtol=1e-5, atol=1e-6)
