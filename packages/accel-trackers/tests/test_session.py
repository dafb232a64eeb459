"""Trackers that are started together and logged to in order."""

from __future__ import annotations

import copy
import logging
import signal
import threading

import pytest
import torch

from accel_state.errors import SettingsError, TrackerError, UnsupportedError
from accel_trackers import LOGGER_TYPE_TO_CLASS, TrackerSession, register_tracker_class
from accel_trackers.termination import TerminationHook


@pytest.fixture
def session(memory):
    session = TrackerSession(memory)
    session.start("project")
    yield session
    session.finish()


class Unreliable:
    """Makes a tracker fail in one method."""

    def __init__(self, method):
        self.method = method

    def __call__(self, kind):
        def fail(*args, **kwargs):
            raise OSError("the disk is full")

        return type("Failing", (kind,), {self.method: fail})


def test_configuration_values_and_ends_arrive_in_order(memory):
    session = TrackerSession([memory])
    config = {"lr": torch.tensor(0.5), "model": {"depth": 2}}
    before = copy.deepcopy(config)
    session.start("project", config)
    session.log({"loss": torch.tensor(1.5), "text": "a"}, step=3, log_kwargs={"memory": {"x": 1}})
    session.finish()
    assert memory.calls == [
        ("start",),
        ("config", {"lr": 0.5, "model": {"depth": 2}}),
        ("log", {"loss": 1.5, "text": "a"}, 3, {"x": 1}),
        ("flush",),
        ("finish",),
    ]
    assert config == before


def test_the_stored_configuration_is_a_copy(memory):
    config = {"model": {"depth": 2}}
    session = TrackerSession(memory)
    session.start("project", config)
    memory.calls[1][1]["model"]["depth"] = 3
    session.finish()
    assert config == {"model": {"depth": 2}}


def test_a_log_that_is_assigned_to_a_running_tracker_is_called(session, memory):
    seen = []
    memory.log = lambda values, step=None: seen.append((values, step))
    session.log({"loss": 1.5}, step=3)
    assert seen == [({"loss": 1.5}, 3)]


def test_several_trackers_get_the_same_and_their_own_options(memory, memory_class):
    register_tracker_class(memory_class)
    try:
        session = TrackerSession(["memory"])
        session.start("project", init_kwargs={"memory": {"entity": "us"}, "wandb": {"entity": "others"}})
    finally:
        del LOGGER_TYPE_TO_CLASS["memory"]
    (made,) = session.trackers
    assert (made.run_name, made.options) == ("project", {"entity": "us"})
    session.finish()


def test_a_tensor_that_changes_afterwards_was_logged_as_it_was(session, memory):
    loss = torch.tensor(1.0)
    session.log({"loss": loss})
    loss.zero_()
    session.log({"loss": loss}, step=1)
    assert memory.logged == [({"loss": 1.0}, None), ({"loss": 0.0}, 1)]


def test_logging_too_early_or_too_late_says_what_to_do(memory):
    session = TrackerSession(memory)
    with pytest.raises(TrackerError, match="before init_trackers"):
        session.log({"loss": 1.0})
    with pytest.raises(SettingsError, match="call init_trackers"):
        session.get("memory")
    session.start("project")
    session.finish()
    session.finish()
    with pytest.raises(TrackerError, match="after end_training"):
        session.log({"loss": 1.0})


def test_without_trackers_everything_may_be_called():
    session = TrackerSession(None)
    session.log({"loss": 1.0})
    session.start("project", {"a": 1})
    session.get("wandb").log_images({"x": 1})
    session.get("wandb", unwrap=True).summary["best"] = 1
    session.write()
    session.finish()


@pytest.mark.parametrize("values", [{"x": torch.zeros(2)}, {"x": torch.zeros((), device="meta")}, [1.0]])
def test_what_cannot_be_logged_is_an_error_at_once(session, memory, values):
    with pytest.raises(UnsupportedError, match=r"log\(\) got"):
        session.log(values)
    assert memory.logged == []


def test_a_configuration_must_have_names(memory):
    with pytest.raises(SettingsError, match=r"init_trackers\(config=3\)"):
        TrackerSession(memory).start("project", 3)


def test_an_unknown_tracker_is_named(session):
    with pytest.raises(
        SettingsError, match="get_tracker\\('wandb'\\): there is no such tracker; there are 'memory'"
    ):
        session.get("wandb")


def test_a_second_start_finishes_the_first_run(session, memory):
    session.log({"loss": 1.0})
    session.start("again")
    assert [call[0] for call in memory.calls] == ["start", "log", "flush", "finish", "start"]


@pytest.mark.parametrize("method", ["start", "store_init_configuration", "log", "flush", "finish"])
def test_an_error_of_a_tracker_is_an_error(memory_class, method):
    failing = Unreliable(method)(memory_class)()
    session = TrackerSession(failing)

    def train():
        try:
            session.start("project", {"a": 1})
            session.log({"loss": 1.0})
        finally:
            session.finish()

    with pytest.raises(OSError, match="the disk is full") as caught:
        train()
    assert any("'memory' failed in" in note for note in caught.value.__notes__)


@pytest.mark.parametrize("method", ["start", "store_init_configuration", "log", "flush", "finish"])
def test_or_one_line_and_the_training_goes_on(memory, memory_class, method, caplog):
    failing = Unreliable(method)(memory_class)()
    session = TrackerSession([failing, memory], on_error="warn")
    session.start("project", {"a": 1})
    for step in range(3):
        session.log({"loss": 1.0}, step)
    if method == "start":
        session.trackers[0].log_images({})
    session.finish()
    assert len(memory.logged) == 3
    lines = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert "The tracker 'memory' failed in" in lines[0]
    assert "the disk is full" in lines[0]
    assert len(lines) == 2  # and how often it was, at the end


def test_another_policy_is_refused(memory):
    with pytest.raises(SettingsError, match="on_tracker_error='ignore'"):
        TrackerSession(memory, on_error="ignore")


def test_a_failing_end_still_ends_the_others(memory, memory_class):
    session = TrackerSession([Unreliable("finish")(memory_class)(), memory])
    session.start("project")
    with pytest.raises(OSError, match="disk"):
        session.finish()
    assert memory.calls[-1] == ("finish",)


def test_the_last_tracker_to_start_is_finished_first(memory_class):
    order = []

    def named(name):
        return type("Named", (memory_class,), {"name": name, "finish": lambda tracker: order.append(name)})()

    session = TrackerSession([named("first"), named("second"), named("third")])
    session.start("project")
    session.finish()
    assert order == ["third", "second", "first"]


def test_what_was_logged_is_flushed_after_the_interval(memory, monkeypatch):
    monkeypatch.setattr("accel_trackers.session.FLUSH_SECONDS", 0.01)
    flushed = threading.Event()
    monkeypatch.setattr(memory, "flush", flushed.set)
    session = TrackerSession(memory)
    session.start("project")
    session.log({"loss": 1.0})
    assert flushed.wait(60)
    session.finish()


def test_it_is_flushed_once_more_for_what_a_library_writes_late_and_then_no_longer(memory):
    session = TrackerSession(memory)
    session.start("project")
    session.log({"loss": 1.0})
    for _ in range(4):
        session.write()
    assert [call[0] for call in memory.calls] == ["start", "log", "flush", "flush"]
    session.finish()


def test_an_error_between_two_calls_is_raised_by_the_next(memory, monkeypatch):
    monkeypatch.setattr("accel_trackers.session.FLUSH_SECONDS", 0.01)
    failed = threading.Event()

    def fail():
        failed.set()
        raise OSError("the disk is full")

    monkeypatch.setattr(memory, "flush", fail)
    session = TrackerSession(memory)
    session.start("project")
    session.log({"loss": 1.0})
    assert failed.wait(60)
    monkeypatch.setattr(memory, "flush", lambda: None)
    with pytest.raises(OSError, match="disk"):
        session.finish()


def test_the_handler_of_a_signal_is_put_back(memory):
    before = signal.getsignal(signal.SIGTERM)
    session = TrackerSession(memory)
    session.start("project")
    assert signal.getsignal(signal.SIGTERM) != before
    session.finish()
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_signal_in_the_midst_of_a_tracker_waits_until_that_is_done(memory_class):
    order = []

    class Interrupted(memory_class):
        def log(self, values, step=None, **kwargs):
            signal.raise_signal(signal.SIGTERM)
            order.append("logged")

        def flush(self):
            order.append("flushed")

    before = signal.signal(signal.SIGTERM, lambda *_: order.append("terminated"))
    try:
        session = TrackerSession(Interrupted())
        session.start("project")
        session.log({"loss": 1.0})
        assert order == ["logged", "flushed", "terminated"]
        session.finish()
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_signal_that_waits_for_the_main_thread_is_not_acted_on_by_another():
    acted = []
    hook = TerminationHook(lambda: acted.append(threading.current_thread()))
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        hook.install()
        with hook, hook:
            signal.raise_signal(signal.SIGTERM)
            hook.act_when_free()
            assert acted == []
            hook.lock.release()  # as log does, between its end and its look for a signal
            hook.lock.release()
            other = threading.Thread(target=lambda: hook.__enter__() or hook.__exit__(None, None, None))
            other.start()
            other.join()
            assert acted == []
            hook.lock.acquire()
            hook.lock.acquire()
        assert acted == [threading.main_thread()]
        hook.remove()
    finally:
        signal.signal(signal.SIGTERM, before)
