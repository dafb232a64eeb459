"""The accumulation plan, and the context that carries it out."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel_train.step import Accumulation, Synchronizer, next_micro_batch


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
