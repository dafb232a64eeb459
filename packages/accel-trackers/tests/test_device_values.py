"""Values on a device are logged without waiting for it, as they were, and in order."""

from __future__ import annotations

import pytest
import torch

from accel_state.testing import late_device
from accel_trackers import TrackerSession


@pytest.mark.parametrize("schedule", ["late", "early"])
def test_values_are_those_of_the_time_of_the_call_and_arrive_in_order(memory, schedule):
    session = TrackerSession(memory)
    session.start("project")
    with late_device(schedule):
        loss = torch.zeros(())
        for step in range(5):
            loss += 1.5
            session.log({"loss": loss, "nested": {"twice": loss * 2}, "lr": 0.1}, step=step)
            loss *= 2
        expected, value = [], 0.0
        for step in range(5):
            value += 1.5
            expected.append(({"loss": value, "nested": {"twice": value * 2}, "lr": 0.1}, step))
            value *= 2
        session.write()
    assert memory.logged == expected
    session.finish()


def test_no_call_waits_for_the_device(memory):
    session = TrackerSession(memory)
    session.start("project")
    with late_device("late"):
        for step in range(3):
            session.log({"loss": torch.ones(()) * step}, step=step)
            assert [one for _, one in memory.logged] == [*range(step)]  # each is there one call later
        session.log({"note": "read in its turn"}, step=3)
        assert [one for _, one in memory.logged] == [0, 1, 2, 3]
    session.finish()


def test_the_end_writes_everything(memory):
    session = TrackerSession(memory)
    session.start("project")
    with late_device("late"):
        session.log({"loss": torch.ones(()) * 3}, step=7)
        session.finish()
    assert memory.logged == [({"loss": 3.0}, 7)]


def test_no_more_than_a_limit_waits(memory, monkeypatch):
    monkeypatch.setattr("accel_trackers.values.PendingValues.is_ready", lambda reading: False)
    monkeypatch.setattr("accel_trackers.session._MOST_WAITING", 2)
    session = TrackerSession(memory)
    session.start("project")
    with late_device("late"):
        for step in range(4):
            session.log({"loss": torch.ones(()) * step}, step=step)
        assert [step for _, step in memory.logged] == [0, 1]
        session.finish()
    assert [step for _, step in memory.logged] == [0, 1, 2, 3]


@pytest.mark.parametrize("schedule", ["late", "early"])
def test_vectors_are_copied_as_they_were(memory, schedule):
    session = TrackerSession(memory)
    session.start("project")
    with late_device(schedule):
        vector = torch.arange(6.0).reshape(2, 3)
        session.log({"inner": {"columns": vector.T, "none": vector[:0]}, "one": vector[1, 2]}, step=1)
        vector.zero_()
        session.finish()
    ((values, step),) = memory.logged
    assert values["inner"]["columns"].tolist() == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]
    assert (values["inner"]["none"].shape, values["one"], step) == ((0, 3), 5.0, 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.float64])
def test_every_dtype_is_read(memory, dtype):
    session = TrackerSession(memory)
    session.start("project")
    with late_device("late"):
        session.log({"value": torch.ones((1, 1), dtype=dtype)})
        session.finish()
    assert memory.logged == [({"value": 1}, None)]


@pytest.mark.gpu
def test_values_of_a_real_device_are_logged_without_a_synchronisation(memory):
    session = TrackerSession(memory)
    session.start("project")
    accelerator = torch.accelerator.current_accelerator()
    loss = torch.zeros((), device=accelerator)
    torch.get_device_module().set_sync_debug_mode("error")
    try:
        for step in range(3):
            loss += 1
            session.log({"loss": loss}, step=step)
    finally:
        torch.get_device_module().set_sync_debug_mode("default")
    session.finish()
    assert memory.logged == [({"loss": 1.0 + step}, step) for step in range(3)]
