"""One optimizer step: accumulation windows, and gradients that are divided by counted items."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accel_plugins.kwargs import GradientAccumulationPlugin
from accel_state.accelerator_state import GradientState
from accel_state.runtime import Runtime
from accel_train import Accelerator
from accel_train.step import Accumulation, ItemWindow, Synchronizer


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
    return GradientState(GradientAccumulationPlugin(**{"num_steps": 2, **changes}))


class Loader:
    end_of_dataloader = False


@given(num_steps=st.integers(1, 7), ends=st.lists(st.booleans(), max_size=60))
def test_a_window_has_num_steps_micro_batches_unless_a_loader_ends_it(num_steps, ends):
    loader = Loader()
    synchronizer = Synchronizer(make_state(num_steps=num_steps), None)
    synchronizer.state._add_dataloader(loader)
    window = 0
    for at_end in ends:
        loader.end_of_dataloader = at_end
        sync = synchronizer.advance()
        synchronizer.state.window.ran_backward = True
        window += 1
        assert sync == (at_end or window == num_steps)
        if sync:
            window = 0
        assert synchronizer.step == window
    synchronizer.state._remove_dataloader(loader)


def test_a_smaller_number_of_steps_takes_effect_within_a_window():
    synchronizer = Synchronizer(make_state(num_steps=2), None)
    synchronizer.step = 3
    assert (synchronizer.advance(), synchronizer.step) == (True, 0)


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


class SimpleLoader:
    """A loader after its last batch."""

    end_of_dataloader, remainder = True, 0


def test_the_end_of_a_loader_completes_a_window_unless_told_otherwise():
    loader = SimpleLoader()
    for sync_with_dataloader in (True, False):
        state = make_state(sync_with_dataloader=sync_with_dataloader)
        state.dataloader_references = [None, loader]
        with Accumulation(Synchronizer(state, None), []):
            assert state.sync_gradients is sync_with_dataloader


def test_sync_each_batch_synchronises_gradients_but_not_optimizers():
    recorder = Recorder()
    state = make_state(sync_each_batch=True)
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

    local = Synchronizer(make_state(), no_sync).local(["first", "second"])
    assert inside == [], "nothing is entered before the block"
    with pytest.raises(ValueError, match="second") as caught:  # keeps the frames alive, and what is in them
        local.__enter__()
    assert inside == []
    assert caught.tb is not None


def make_pair(accelerator):
    model = torch.nn.Linear(1, 1, bias=False)
    return accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))


def micro_batch(accelerator, model, optimizer, value=1.0):
    """Run one micro-batch; return the gradient with which the optimizer steps, `None` if it does not."""
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.full((1, 1), value)).sum())
        optimizer.step()
        gradient = accelerator.unwrap_model(model).weight.grad.item() if accelerator.sync_gradients else None
        optimizer.zero_grad()
    return gradient


@pytest.mark.parametrize("steps", [1, 2, 4])
@pytest.mark.parametrize("place", ["first", "before backward", "both"])
@pytest.mark.parametrize("counted", [False, True])
def test_gradients_may_be_cleared_at_the_beginning_of_the_loop(steps, place, counted):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps)
    (model, optimizer), (_, other) = make_pair(accelerator), make_pair(accelerator)
    gradients = []
    for value in range(1, 9):
        with accelerator.accumulate(model):
            if place != "before backward":
                optimizer.zero_grad()
                other.zero_grad()
            loss = model(torch.full((1, 1), float(value))).sum()
            if place == "before backward":
                optimizer.zero_grad()
            accelerator.backward(loss, num_items=1 if counted else None)
            if accelerator.sync_gradients:
                gradients.append(model.weight.grad.item())
            optimizer.step()
            other.step()
            if place == "both":
                optimizer.zero_grad()
    assert gradients == [sum(range(i, i + steps)) / steps for i in range(1, 9, steps)]


def test_gradients_that_are_not_finite_can_be_thrown_away_after_the_backward_pass():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer = make_pair(accelerator)
    gradients = []
    for index in range(6):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.full((1, 1), float("nan") if index == 1 else 1.0)).sum())
            if accelerator.sync_gradients:
                if not model.weight.grad.isfinite():
                    optimizer.zero_grad()
                    continue
                gradients.append(model.weight.grad.item())
            optimizer.step()
            optimizer.zero_grad()
    assert gradients == [1.0, 1.0]


@pytest.mark.parametrize("clear_first", [False, True])
def test_a_window_whose_last_micro_batch_is_left_out_ends_with_the_next(clear_first):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    model, optimizer = make_pair(accelerator)
    gradients = []
    for index in range(9):
        with accelerator.accumulate(model):
            if clear_first:
                optimizer.zero_grad()
            if index in {2, 3}:
                continue
            accelerator.backward(model(torch.ones(1, 1)).sum())
            if accelerator.sync_gradients:
                gradients.append(round(model.weight.grad.item(), 5))
            optimizer.step()
            if not clear_first:
                optimizer.zero_grad()
    assert gradients == [1.0, 1.0], "two micro-batches, the next that ran, and a window of three"


def test_a_window_that_ended_without_a_step_is_not_repeated():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, _ = make_pair(accelerator)
    ends = []
    for _ in range(6):  # a script that looks at gradients alone
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(1, 1)).sum())
            ends.append(accelerator.sync_gradients)
    assert ends == [False, True] * 3


def test_each_accelerator_has_its_own_window():
    def make(**plugin):
        accelerator = Accelerator(gradient_accumulation_plugin=GradientAccumulationPlugin(**plugin), cpu=True)
        return accelerator, *make_pair(accelerator)

    first, second = make(num_steps=3, sync_with_dataloader=False), make(num_steps=2)
    third = make(num_steps=1)
    gradients = [[micro_batch(*run) for run in (first, second, third)] for _ in range(6)]
    assert [[gradient is not None for gradient in row] for row in zip(*gradients, strict=True)] == [
        [False, False, True] * 2,
        [False, True] * 3,
        [True] * 6,
    ]
    assert {gradient for row in gradients for gradient in row} == {None, 1.0}
    assert [run[0].gradient_accumulation_steps for run in (first, second, third)] == [3, 2, 1]
    first[0].gradient_accumulation_steps = 4
    assert [run[0].gradient_accumulation_steps for run in (first, second, third)] == [4, 2, 1]
    assert not first[0].gradient_state.sync_with_dataloader


def test_an_optimizer_outside_of_any_window_steps_beside_one_within():
    inside, outside = Accelerator(cpu=True, gradient_accumulation_steps=4), Accelerator(cpu=True)
    accumulated, stepped = make_pair(inside), make_pair(outside)
    before = stepped[0].weight.item()
    assert micro_batch(inside, *accumulated) is None
    outside.backward(stepped[0](torch.ones(1, 1)).sum())
    stepped[1].step()
    assert stepped[0].weight.item() == pytest.approx(before - 1)
    assert outside.sync_gradients
    assert not inside.sync_gradients


def test_models_of_different_optimizers_have_their_own_windows():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    generator, critic = make_pair(accelerator), make_pair(accelerator)
    steps = [[micro_batch(accelerator, *pair) for pair in (generator, critic)] for _ in range(4)]
    assert steps == [[None, None], [1.0, 1.0]] * 2
    assert accelerator.step == 0
    ends = []
    for _ in range(4):
        with accelerator.accumulate(generator[0]), accelerator.accumulate(critic[0]):
            ends.append(accelerator.sync_gradients)
    assert ends == [False, True] * 2


def test_blocks_of_two_models_of_one_optimizer_share_the_window():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    models = [accelerator.prepare(torch.nn.Linear(1, 1)) for _ in range(2)]
    accelerator.prepare(torch.optim.SGD([p for model in models for p in model.parameters()], lr=1.0))
    accelerator.prepare(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0))
    ends = []
    for model in models * 3:
        with accelerator.accumulate(model):
            ends.append(accelerator.sync_gradients)
    assert ends == [False, True] * 3


def test_no_sync_acts_when_it_is_entered():
    log = []

    @contextmanager
    def no_sync(model):
        log.append("enter")
        yield
        log.append("exit")

    accelerator = Accelerator(cpu=True)
    accelerator._parts.synchronizer.no_sync = no_sync
    block = accelerator.no_sync(torch.nn.Linear(1, 1))
    assert log == []
    with block:
        assert log == ["enter"]
    assert log == ["enter", "exit"]
