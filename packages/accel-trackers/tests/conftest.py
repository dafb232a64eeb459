"""A tracker that keeps what it gets."""

from __future__ import annotations

import pytest

from accel_trackers.general import GeneralTracker, on_main_process


class Memory(GeneralTracker):
    name = "memory"
    requires_logging_directory = False

    def __init__(self, run_name="run", **kwargs):
        super().__init__()
        self.run_name = run_name
        self.options = kwargs
        self.calls = []

    @property
    def tracker(self):
        return self.calls

    def start(self):
        self.calls.append(("start",))

    @on_main_process
    def store_init_configuration(self, values):
        self.calls.append(("config", values))

    @on_main_process
    def log(self, values, step=None, **kwargs):
        self.calls.append(("log", values, step, kwargs))

    def flush(self):
        self.calls.append(("flush",))

    def finish(self):
        self.calls.append(("finish",))

    @property
    def logged(self):
        return [call[1:3] for call in self.calls if call[0] == "log"]


@pytest.fixture
def memory():
    return Memory()


@pytest.fixture
def memory_class():
    return Memory
