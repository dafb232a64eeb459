"""One optimizer step: accumulation windows, and gradients that are divided by counted items."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accel_state.runtime import Runtime
from accel_train import Accelerator
from accel_train.step import Accumulation, ItemWindow, Synchronizer, next_micro_batch


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


def make_state(**changes):
    state = SimpleNamespace(
        sync_gradients=True, sync_with_dataloader=True, end_of_dataloader=False, num_steps=2, plugin_kwargs={}
    )
    for name, value in changes.items():
        setattr(state, name, value)
    return state


@given(num_steps=st.integers(1, 7), ends=st.lists(st.booleans(), max_size=60))
def test_a_window_has_num_steps_micro_batches_unless_a_loader_ends_it(num_steps, ends):
    done, window = 0, 0
    for at_end in ends:
        done, sync = next_micro_batch(done, num_steps=num_steps, at_end=at_end)
        window += 1
        assert sync == (at_end or window == num_steps)
        if sync:
            window = 0
        assert done == window


def test_a_smaller_number_of_steps_takes_effect_within_a_window():
    assert next_micro_batch(3, num_steps=2, at_end=False) == (0, True)


class Recorder:
    """Stands for a strategy: remembers which models are in its context."""

    def __init__(self):
        self.inside = []

    @contextmanager
    def no_sync(self, model):
        self.inside.append(model)
        try:
            yield
        finally:
            self.inside.remove(model)


def test_gradients_of_all_models_stay_local_until_the_window_is_complete():
    recorder = Recorder()
    synchronizer = Synchronizer(make_state(), recorder.no_sync)
    seen = []
    for _ in range(4):
        with Accumulation(synchronizer, ["generator", "critic"]):
            seen.append(list(recorder.inside))
        assert recorder.inside == []
    assert seen == [["generator", "critic"], []] * 2


def test_the_end_of_a_loader_completes_a_window_unless_told_otherwise():
    for sync_with_dataloader in (True, False):
        state = make_state(end_of_dataloader=True, sync_with_dataloader=sync_with_dataloader)
        with Accumulation(Synchronizer(state, None), []):
            assert state.sync_gradients is sync_with_dataloader


def test_sync_each_batch_synchronises_gradients_but_not_optimizers():
    recorder = Recorder()
    state = make_state(plugin_kwargs={"sync_each_batch": True})
    with Accumulation(Synchronizer(state, recorder.no_sync), ["model"]):
        assert recorder.inside == []
        assert state.sync_gradients is False


def test_an_error_in_the_body_leaves_the_context_of_the_models():
    recorder = Recorder()
    synchronizer = Synchronizer(make_state(), recorder.no_sync)
    with pytest.raises(ZeroDivisionError), Accumulation(synchronizer, ["model"]):
        raise ZeroDivisionError
    assert recorder.inside == []


def test_local_does_nothing_where_there_is_one_process():
    with Synchronizer(make_state(), None).local(["model"]):
        pass


def test_a_context_that_cannot_be_entered_leaves_those_before_it():
    inside = []

    @contextmanager
    def no_sync(model):
        if model == "second":
            raise ValueError(model)
        inside.append(model)
        try:
            yield
        finally:
            inside.remove(model)

    with pytest.raises(ValueError, match="second") as caught:  # keeps the frames alive, and what is in them
        Synchronizer(make_state(), no_sync).local(["first", "second"])
    assert inside == []
    assert caught.tb is not None
