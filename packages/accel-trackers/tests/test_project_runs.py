"""What runs of a project get from a session: numbers, texts of the library, histograms."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from accel_trackers import TrackerSession
from accel_trackers.project_runs import ProjectRunTracker, SwanLabTracker

VALUES = {"loss": {"train": torch.tensor(0.5)}, "lr": np.float32(2), 3: "a", "epoch": 4}
PLAIN = {"loss": {"train": 0.5}, "lr": 2.0, "3": "a", "epoch": 4}


class Rows(list):
    """A run that keeps what is logged."""

    def log(self, values, step=None, **kwargs):
        self.append((values, step, kwargs))

    def finish(self):
        pass


def tracker_of(kind):
    """A tracker of a library that is only a run."""

    class Tracker(kind):
        name = "rows"

        def __init__(self):
            self.run = Rows()
            self._library = SimpleNamespace(
                Text=lambda text: ("text", text), Histogram=lambda numbers: ("histogram", numbers)
            )

        def flush(self):
            pass

    return Tracker()


def logged(tracker, values, **kwargs):
    session = TrackerSession([tracker])
    session.start("project")
    session.log(values, step=7, log_kwargs={"rows": kwargs} if kwargs else None)
    session.finish()
    return tracker.run


@pytest.mark.parametrize("kwargs", [{}, {"commit": True}])
def test_a_run_gets_the_numbers(kwargs):
    assert logged(tracker_of(ProjectRunTracker), VALUES, **kwargs) == [(PLAIN, 7, kwargs)]


@pytest.mark.parametrize("kwargs", [{}, {"print_to_console": True}])
def test_swanlab_gets_flat_numbers_and_its_own_texts(kwargs):
    flat = {"loss.train": 0.5, "lr": 2.0, "3": ("text", "a"), "epoch": 4}
    assert logged(tracker_of(SwanLabTracker), VALUES, **kwargs) == [(flat, 7, kwargs)]


@pytest.mark.parametrize("kind", [ProjectRunTracker, SwanLabTracker])
def test_a_tracker_takes_the_same_from_its_users(kind):
    own, by_session = tracker_of(kind), tracker_of(kind)
    values = {"loss": torch.tensor(0.5), "note": "a", "lr": 0.1}
    own.log(values, step=7)
    assert own.run == logged(by_session, values)


def test_a_run_gets_histograms_of_vectors_in_the_same_call():
    values = {"loss": torch.tensor(0.5), "inner": {"grads": torch.tensor([1.0, float("nan"), 3.0])}}
    ((row, step, _),) = logged(tracker_of(ProjectRunTracker), values)
    assert (row["loss"], row["inner"], step) == (0.5, {}, 7)
    assert (row["inner.grads"][0], row["inner.grads"][1].tolist()) == ("histogram", [1.0, 3.0])


def test_swanlab_which_has_no_histograms_skips_vectors_with_a_warning(caplog):
    values = {"loss": torch.tensor(0.5), "grads": np.ones(3)}
    for _ in range(2):
        tracker = tracker_of(SwanLabTracker)
        assert logged(tracker, values) == [({"loss": 0.5}, 7, {})]
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith("The tracker 'rows' cannot log 'grads', which is a numpy.ndarray of shape (3,)")


@pytest.mark.parametrize("kind", [ProjectRunTracker, SwanLabTracker])
def test_a_subclass_that_logs_otherwise_is_called(kind):
    class Doubling(kind):
        def log(self, values, step=None, **kwargs):
            super().log({name: 2 * value for name, value in values.items()}, step, **kwargs)

    assert logged(tracker_of(Doubling), {"loss": torch.tensor(0.5)}) == [({"loss": 1.0}, 7, {})]
