"""Counting items: windows on one process, what ends them, and what is refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accel_state.runtime import Runtime
from accel_train import Accelerator
from accel_train.step import ItemWindow


def make_training(**options):
    accelerator = Accelerator(cpu=True, **options)
    model = torch.nn.Linear(1, 1, bias=False).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with torch.no_grad():
        model.weight.fill_(0.0)
    return accelerator, *accelerator.prepare(model, optimizer)


def summed(model, total):
    """A loss whose gradient is `total`."""
    return model(torch.tensor([[float(total)]], dtype=torch.float64)).sum()


@given(
    st.lists(
        st.tuples(
            st.floats(-1e3, 1e3),
            st.integers(0, 50) | st.floats(0, 50).map(lambda n: round(n, 2)),
            st.booleans(),
        ),
        min_size=1,
        max_size=8,
    )
)
def test_gradients_are_the_sum_by_the_count_however_often_they_are_looked_at(passes):
    weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    window = ItemWindow(Runtime(), lambda: [weight, weight])
    for total, count, look in passes:
        window.add(count)
        (weight * total).sum().backward()
        if look:
            window.normalize()
    window.normalize()
    window.normalize()
    items = sum(count for _, count, _ in passes) or 1
    assert weight.grad.item() == pytest.approx(
        sum(total for total, _, _ in passes) / items, rel=1e-9, abs=1e-9
    )


def test_a_window_grows_until_the_optimizer_steps():
    accelerator, model, optimizer = make_training()
    for total, count, expected in ((6.0, 2, 3.0), (4.0, torch.tensor(3), 2.0)):
        accelerator.backward(summed(model, total), num_items=count)
        assert model.weight.grad.item() == pytest.approx(expected)
    optimizer.step()
    optimizer.zero_grad()
    assert model.weight.item() == pytest.approx(-2)
    accelerator.backward(summed(model, 8), num_items=2)
    assert model.weight.grad.item() == 4


def test_gradients_that_were_thrown_away_leave_no_count_behind():
    accelerator, model, optimizer = make_training()
    accelerator.backward(summed(model, 6), num_items=2)
    optimizer.zero_grad()
    accelerator.backward(summed(model, 6), num_items=3)
    model.zero_grad()
    accelerator.backward(summed(model, 6), num_items=1)
    assert model.weight.grad.item() == 6
    accelerator.free_memory()
    assert not accelerator._parts.items.is_open


def test_several_losses_of_the_same_items_are_counted_once():
    accelerator, model, _ = make_training(gradient_accumulation_steps=2)
    for _ in range(2):
        with accelerator.accumulate(model):
            accelerator.backward(summed(model, 3), num_items=2)
            accelerator.backward(summed(model, 5), num_items=0)
    assert model.weight.grad.item() == pytest.approx(16 / 4)


def test_a_model_without_optimizer_has_divided_gradients():
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(torch.nn.Linear(1, 1, bias=False).double())
    accelerator.backward(summed(model, 6), num_items=4)
    assert model.weight.grad.item() == 1.5


def test_no_items_at_all_give_no_nan():
    accelerator, model, optimizer = make_training()
    accelerator.backward(summed(model, 0), num_items=0)
    optimizer.step()
    assert model.weight.item() == 0


def test_clipping_and_unscaling_see_divided_gradients_within_no_sync_too():
    accelerator, model, _ = make_training()
    with accelerator.no_sync(model):
        accelerator.backward(summed(model, 6), num_items=2)
        assert model.weight.grad.item() == 6
        assert accelerator.clip_grad_norm_(model.parameters(), 1.0).item() == 3


@pytest.mark.parametrize("count", [-1, float("nan"), True, torch.ones(2)])
def test_what_is_no_count_is_refused(count):
    accelerator, model, _ = make_training()
    with pytest.raises(ValueError, match="num_items"):
        accelerator.backward(summed(model, 1), num_items=count)
    assert model.weight.grad is None


def test_a_loss_without_count_within_a_counted_window_is_refused():
    accelerator, model, optimizer = make_training()
    accelerator.backward(summed(model, 1), num_items=1)
    with pytest.raises(ValueError, match="without num_items"):
        accelerator.backward(summed(model, 1))
    optimizer.step()
    accelerator.backward(summed(model, 1))


def test_counting_needs_something_prepared():
    with pytest.raises(ValueError, match="prepare"):
        Accelerator(cpu=True).backward(torch.ones((), requires_grad=True) * 2, num_items=1)
