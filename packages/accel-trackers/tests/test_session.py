"""Trackers that are started together and logged to in order."""

from __future__ import annotations

import copy
import gc
import logging
import multiprocessing
import os
import signal
import threading
from unittest.mock import ANY

import numpy as np
import pytest
import torch

from accel_state.errors import SettingsError, TrackerError, UnsupportedError
from accel_trackers import LOGGER_TYPE_TO_CLASS, TrackerSession, register_tracker_class
from accel_trackers.general import GeneralTracker


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


@pytest.mark.gpu
def test_values_of_a_real_device_are_logged_without_a_synchronisation(session, memory):
    loss = torch.zeros((), device=torch.accelerator.current_accelerator())
    torch.get_device_module().set_sync_debug_mode("error")
    try:
        for step in range(3):
            loss += 1
            session.log({"loss": loss}, step=step)
    finally:
        torch.get_device_module().set_sync_debug_mode("default")
    session.write()
    assert memory.logged == [({"loss": 1.0 + step}, step) for step in range(3)]


class BusyDevice:
    """A device whose work is never done unless it is waited for; its streams and events are one object."""

    def new_event(self):
        return self

    current_stream = record = synchronize = lambda self, *args: None

    def query(self):
        return False


def test_calls_that_wait_for_a_device_are_bounded(session, memory, monkeypatch):
    def copy(values, streams):
        streams["busy"] = BusyDevice()
        return dict(values)

    monkeypatch.setattr("accel_trackers.session.copy_to_host", copy)
    for step in range(300):
        session.log({"loss": 1.0}, step=step)
    assert 300 - len(memory.logged) <= 256
    session.write()
    assert [step for _, step in memory.logged] == [*range(300)]


@pytest.fixture
def on_rank_1(monkeypatch):
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("on_rank_1")
def test_trackers_may_be_started_on_the_main_process_alone():
    session = TrackerSession("tensorboard", "project")
    session.log({"loss": 1.0})
    session.get("tensorboard").log_images({"x": 1})
    session.get("tensorboard", unwrap=True).add_text("a", "b")
    session.write()
    session.finish()
    assert session.trackers == []


def test_without_trackers_everything_may_be_called():
    session = TrackerSession(None)
    session.log({"loss": 1.0})
    session.start("project", {"a": 1})
    session.get("wandb").log_images({"x": 1})
    session.get("wandb", unwrap=True).summary["best"] = 1
    session.write()
    session.finish()


def test_what_has_no_names_is_an_error_at_once(session, memory):
    with pytest.raises(UnsupportedError, match=r"log\(\) got \[1.0\]"):
        session.log([1.0])
    assert memory.logged == []


def test_a_tracker_of_ones_own_gets_every_value(session, memory):
    vector, array = torch.arange(3.0, requires_grad=True), np.ones(2)
    values = {"none": None, "list": [1], "inner": {"vector": vector}, "array": array, "one": torch.ones(1, 1)}
    session.log({**values, "meta": torch.empty(2, device="meta")}, step=1)
    with torch.no_grad():
        vector.zero_()
    array[:] = 0
    ((logged, step),) = memory.logged
    assert (logged["none"], logged["list"], logged["one"], step) == (None, [1], 1.0, 1)
    assert (logged["inner"]["vector"].tolist(), logged["array"].tolist()) == ([0.0, 1.0, 2.0], [1.0, 1.0])
    assert logged["meta"].is_meta
    assert not logged["inner"]["vector"].requires_grad


def test_a_configuration_must_have_names(memory):
    with pytest.raises(SettingsError, match=r"init_trackers\(config=3\)"):
        TrackerSession(memory).start("project", 3)


def test_an_unknown_tracker_is_named(session):
    with pytest.raises(
        SettingsError, match=r"get_tracker\('wandb'\): no such tracker\. Available are 'memory'"
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
    assert len(lines) == 1


def test_nothing_runs_after_a_tracker_that_does_not_start(memory, memory_class):
    session = TrackerSession([memory, Unreliable("start")(memory_class)()])
    with pytest.raises(OSError, match="the disk is full"):
        session.start("project")
    with pytest.raises(TrackerError, match="called before init_trackers"):
        session.log({"loss": 1.0})


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


def test_log_lets_the_trackers_flush_when_the_interval_has_passed(session, memory, monkeypatch):
    seconds = [100.0]
    monkeypatch.setattr("accel_trackers.session.monotonic", lambda: seconds[0])
    session.start("project")
    for seconds[0] in (100.0, 109.0, 110.5, 111.0, 120.0, 121.0):
        session.log({"loss": 1.0})
    names = [call[0] for call in memory.calls]
    assert names[names.index("log") :] == ["log", "log", "log", "flush", "log", "log", "log", "flush"]


def test_trackers_are_called_in_the_thread_that_calls(memory_class, monkeypatch):
    monkeypatch.setattr("accel_trackers.session.FLUSH_SECONDS", 0.0)
    threads = set()

    def called_in(*args, **kwargs):
        threads.add(threading.current_thread())

    methods = ("start", "store_init_configuration", "log", "flush", "finish")
    before = threading.enumerate()
    session = TrackerSession(type("Threads", (memory_class,), dict.fromkeys(methods, called_in))())
    session.start("project", {"a": 1})
    session.log({"loss": 1.0})
    assert threading.enumerate() == before
    session.finish()
    assert threads == {threading.main_thread()}


def test_signals_are_left_alone(session, memory):
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_options_for_no_tracker_are_named_once(memory, caplog):
    session = TrackerSession(memory)
    session.start("project", init_kwargs={"memroy": {"x": 1}, "wandb": {"entity": "us"}, "memory": {}})
    session.finish()
    assert [record.getMessage() for record in caplog.records] == [
        (
            "init_trackers(init_kwargs=…) has options for 'memroy', which is not a tracker: "
            "did you mean 'memory'?"
        ),
    ]


class File(GeneralTracker):
    """Writes to a file what is called in which process."""

    name = "file"
    requires_logging_directory = False

    def __init__(self, path):
        self.tracker = path.open("w")
        super().__init__()

    def write(self, what):
        print(what, os.getpid(), file=self.tracker)

    def log(self, values, step=None, **kwargs):
        self.write("log")

    def flush(self):
        self.write("flush")
        self.tracker.flush()

    def finish(self):
        self.write("finish")
        self.tracker.close()


def use_in_child(session):
    """What a forked child can do with the session of its parent; it ends by its function's end."""
    messages = []
    try:
        session.log({"loss": 1.0})
    except TrackerError as error:
        messages.append(str(error))
    session.write()
    session.finish()
    session.get("file").flush()
    gc.collect()
    return [*messages, type(session.get("file", unwrap=True)).__name__]


@pytest.fixture
def shared_session(tmp_path):
    """A session that forked children find; the parent's file holds back what is logged."""
    session = TrackerSession(File(tmp_path / "calls"))
    session.start("project")
    _shared.append(session)
    yield session
    _shared.clear()
    session.finish()


_shared = []


def use_shared(_):
    return use_in_child(_shared[0])


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_forked_children_leave_the_trackers_alone(shared_session, tmp_path):
    shared_session.log({"loss": 1.0})
    for _ in range(3):
        with multiprocessing.get_context("fork").Pool(2) as pool:  # which ends its workers by SIGTERM
            answers = pool.map(use_shared, range(4))
        assert answers == [[ANY, "NullTracker"]] * 4
        assert "forked from the one that started the trackers" in answers[0][0]
    shared_session.log({"loss": 1.0})
    shared_session.finish()
    pid = str(os.getpid())
    lines = [line.split() for line in (tmp_path / "calls").read_text().splitlines()]
    # A slow machine may have flushed twice.
    assert [line for line in lines if line[0] != "flush"] == [["log", pid], ["log", pid], ["finish", pid]]
    assert {line[1] for line in lines} == {pid}


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_starts_trackers_of_its_own(shared_session, tmp_path):
    def start_anew(path):
        session = _shared[0]
        session.log_with = [File(path)]
        session.start("project")
        session.log({"loss": 1.0})
        session.finish()

    path = tmp_path / "of_child"
    child = multiprocessing.get_context("fork").Process(target=start_anew, args=(path,))
    child.start()
    child.join()
    assert child.exitcode == 0
    assert path.read_text().split()[::2] == ["log", "flush", "finish"]
    assert (tmp_path / "calls").read_text() == ""


@pytest.mark.gpu
def test_values_of_a_device_are_logged_as_they_were_at_the_time_of_the_call(session, memory):
    loss = torch.zeros((), device=torch.accelerator.current_accelerator())
    for step in range(3):
        loss += 1.5
        session.log({"loss": loss, "twice": loss * 2}, step=step)
        loss *= 2
    session.write()
    logged = [(call[1], call[2]) for call in memory.calls if call[0] == "log"]
    assert logged == [({"loss": v, "twice": 2 * v}, step) for step, v in enumerate([1.5, 4.5, 10.5])]
