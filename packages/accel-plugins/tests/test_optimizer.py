"""The optimizer wrapper: what it forwards, and when it acts."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch

from accel_plugins.optimizer import AcceleratedOptimizer, move_to_device
from accel_state.accelerator_state import GradientState


def make(cls=torch.optim.SGD, **options):
    weight = torch.nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    inner = cls([weight], **{"lr": 0.5, **options})
    return weight, inner, AcceleratedOptimizer(inner)


def test_it_steps_and_clears_only_when_gradients_are_synchronised():
    weight, _, optimizer = make()
    GradientState().sync_gradients = False
    optimizer.step()
    optimizer.zero_grad()
    assert weight.tolist() == [1, 1, 1]
    assert weight.grad is not None
    GradientState().sync_gradients = True
    optimizer.step()
    assert weight.tolist() == [0.5, 0.5, 0.5]
    optimizer.zero_grad(set_to_none=False)
    assert weight.grad.tolist() == [0, 0, 0]
    optimizer.zero_grad()
    assert weight.grad is None


def test_a_step_says_whether_it_was_skipped():
    _, inner, _ = make()
    outcomes = [False, True]
    optimizer = AcceleratedOptimizer(inner, step=lambda optimizer, closure: outcomes.pop(0))
    optimizer.step()
    assert optimizer.step_was_skipped
    optimizer.step()
    assert not optimizer.step_was_skipped


def test_a_closure_is_evaluated_by_the_wrapped_optimizer_and_its_first_loss_returned():
    weight = torch.nn.Parameter(torch.tensor([4.0]))
    optimizer = AcceleratedOptimizer(torch.optim.LBFGS([weight], lr=0.5, max_iter=5))
    calls = []

    def closure():
        optimizer.zero_grad()
        loss = weight.square().sum()
        loss.backward()
        calls.append(loss.item())
        return loss

    loss = optimizer.step(closure)
    assert loss.item() == 16
    assert len(calls) > 1


def test_groups_state_and_defaults_are_those_of_the_wrapped_optimizer():
    _, inner, optimizer = make(momentum=0.9)
    optimizer.step()
    assert optimizer.param_groups is inner.param_groups
    assert optimizer.state is inner.state
    assert optimizer.defaults is inner.defaults
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
    assert len(inner.param_groups) == 2
    optimizer.param_groups = []
    optimizer.state = {}
    assert inner.param_groups == []
    assert inner.state == {}


def test_a_state_dict_goes_through_unchanged():
    _, inner, optimizer = make(momentum=0.9)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    _, other, again = make(momentum=0.9)
    again.load_state_dict(saved)
    assert torch.equal(
        other.state_dict()["state"][0]["momentum_buffer"], inner.state_dict()["state"][0]["momentum_buffer"]
    )


def test_it_is_an_optimizer_for_schedulers_which_see_its_steps():
    _, _, optimizer = make()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
        scheduler.step()
    assert optimizer.optimizer.param_groups[0]["lr"] == 0.25


def test_hooks_are_registered_on_the_wrapped_optimizer():
    _, _, optimizer = make()
    seen = []
    optimizer.register_step_post_hook(lambda *_: seen.append("stepped"))
    optimizer.step()
    assert seen == ["stepped"]


def test_modes_of_schedule_free_optimizers_are_forwarded_and_others_have_none():
    class WithModes(torch.optim.SGD):
        mode = None

        def train(self):
            self.mode = "train"

        def eval(self):
            self.mode = "eval"

    _, inner, optimizer = make(WithModes)
    optimizer.train()
    assert inner.mode == "train"
    optimizer.eval()
    assert inner.mode == "eval"
    _, _, plain = make()
    assert plain.train() is None
    assert plain.eval() is None


def test_it_can_be_pickled_and_copied():
    _, _, optimizer = make(momentum=0.9)
    optimizer.step()
    for clone in (pickle.loads(pickle.dumps(optimizer)), copy.deepcopy(optimizer)):
        assert clone.state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]
        GradientState().sync_gradients = False
        before = clone.param_groups[0]["params"][0].clone()
        clone.step()
        assert torch.equal(clone.param_groups[0]["params"][0], before)
        GradientState().sync_gradients = True


def test_a_missing_attribute_is_reported_as_such():
    _, _, optimizer = make()
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = optimizer.no_such_thing


def test_state_follows_the_parameters_unless_told_otherwise():
    for placement, device in ((True, "meta"), (False, "cpu")):
        weight, inner, _ = make(momentum=0.9)
        inner.step()
        weight.grad = None
        # What moving a model does to its parameters.
        torch.utils.swap_tensors(weight, torch.nn.Parameter(weight.to("meta")))
        AcceleratedOptimizer(inner, device_placement=placement)
        assert inner.state[weight]["momentum_buffer"].device.type == device


def test_move_to_device_walks_nested_state():
    moved = move_to_device({"a": [torch.ones(1)], "step": 3, "b": (torch.ones(2), "x")}, "meta")
    assert moved["a"][0].device.type == moved["b"][0].device.type == "meta"
    assert moved["step"] == 3
    assert moved["b"][1] == "x"


def test_a_scaler_given_alone_scales_and_reports_overflow():
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    weight = torch.nn.Parameter(torch.tensor([1.0]))
    optimizer = AcceleratedOptimizer(torch.optim.SGD([weight], lr=0.5), scaler=scaler)
    scaler.scale(weight.sum()).backward()
    optimizer.step()
    assert weight.item() == 0.5
    assert not optimizer.step_was_skipped
    optimizer.zero_grad()
    scaler.scale(weight.sum() * float("inf")).backward()
    optimizer.step()
    assert optimizer.step_was_skipped
    assert weight.item() == 0.5
