"""What `log_system_metrics=True` adds to a log, against a clock of the test's own."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader

from accel_trackers.general import GeneralTracker
from accel_train import Accelerator


class Memory(GeneralTracker):
    name = "memory"
    requires_logging_directory = False
    tracker = None

    def __init__(self):
        super().__init__()
        self.rows = []

    def log(self, values, step=None, **kwargs):
        self.rows.append((step, values))


@pytest.fixture
def clock(monkeypatch):
    """Time that passes when a test says so."""
    now = [100.0]
    monkeypatch.setattr("accel_train.profiling.perf_counter", lambda: now[0])

    def passes(seconds):
        now[0] += seconds

    return passes


class Slow:
    """Ten samples, each of which takes an eighth of a second to read."""

    def __init__(self, clock):
        self.clock = clock

    def __len__(self):
        return 10

    def __getitem__(self, index):
        self.clock(0.125)
        return torch.full((2,), float(index))


def prepared(clock, **options):
    tracker = Memory()
    accelerator = Accelerator(cpu=True, log_with=tracker, log_system_metrics=True, **options)
    accelerator.init_trackers("run")
    model = torch.nn.Linear(2, 1)
    loader = DataLoader(Slow(clock), batch_size=4)
    return accelerator, tracker, *accelerator.prepare(model, torch.optim.SGD(model.parameters()), loader)


def test_every_step_is_measured_and_logged_with_the_users_step(clock):
    accelerator, tracker, model, optimizer, loader = prepared(clock)
    for number, batch in enumerate(loader):
        clock(0.25)
        accelerator.backward(model(batch).mean())
        optimizer.step()
        optimizer.zero_grad()
        accelerator.log({"loss": 0.5}, step=10 * number)
    # One batch is read ahead: two of four samples each before the first step, the last two before the second.
    waits = [8 / 8, 2 / 8, 0.0]
    expected = [
        (
            10 * number,
            {
                "loss": 0.5,
                "system/step_seconds": wait + 0.25,
                "system/data_wait_share": wait / (wait + 0.25),
                "system/samples_per_second": samples / (wait + 0.25),
            },
        )
        for number, (wait, samples) in enumerate(zip(waits, [4, 4, 2], strict=True))
    ]
    assert tracker.rows == expected


def test_steps_between_two_logs_are_counted_together_and_accumulation_is_one_step(clock):
    accelerator, tracker, model, optimizer, loader = prepared(clock, gradient_accumulation_steps=2)
    for _ in range(2):
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(batch).sum())
                clock(0.5)
                optimizer.step()
                optimizer.zero_grad()
    accelerator.log({"loss": 0.5}, step=4)
    ((_, values),) = tracker.rows
    seconds = 2 * (3 * 0.5 + 10 * 0.125)  # of twice three batches, ten samples and two steps
    assert values["system/step_seconds"] == seconds / 4
    assert values["system/samples_per_second"] == 20 / seconds
    assert values["system/data_wait_share"] == 2 * 10 * 0.125 / seconds


def test_a_log_within_a_window_waits_for_its_step(clock):
    accelerator, tracker, model, optimizer, loader = prepared(clock, gradient_accumulation_steps=3)
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).sum())
            clock(1.0)
            optimizer.step()
        accelerator.log({"loss": 0.5})
    assert [set(values) - {"loss"} == set() for _, values in tracker.rows] == [True, True, False]
    assert tracker.rows[-1][1]["system/step_seconds"] == 3 * 1.0 + 10 * 0.125


def test_an_evaluation_between_two_logs_counts_for_nothing(clock):
    accelerator, tracker, model, optimizer, loader = prepared(clock)
    evaluation = accelerator.prepare(DataLoader(Slow(clock), batch_size=4))
    for batch in loader:
        accelerator.backward(model(batch).mean())
        clock(0.25)
        optimizer.step()
    accelerator.log({"loss": 0.5}, step=1)
    for _ in evaluation:
        clock(5.0)
    accelerator.log({"accuracy": 0.5}, step=1)
    for batch in loader:
        accelerator.backward(model(batch).mean())
        clock(0.25)
        optimizer.step()
    accelerator.log({"loss": 0.5}, step=2)
    first, between, second = (values for _, values in tracker.rows)
    assert between == {"accuracy": 0.5}
    assert first == second
    assert first["system/samples_per_second"] == 10 / (3 * 0.25 + 10 * 0.125)


def test_steps_count_on_after_objects_were_released(clock):
    accelerator, tracker, model, optimizer, loader = prepared(clock)
    for _ in range(2):
        for batch in loader:
            clock(0.25)
            accelerator.backward(model(batch).mean())
            optimizer.step()
        accelerator.log({"loss": 0.5})
        accelerator.free_memory()
        model, optimizer, loader = accelerator.prepare(
            model, torch.optim.SGD(model.parameters()), DataLoader(Slow(clock), batch_size=4)
        )
    first, second = (values for _, values in tracker.rows)
    assert first == second
    assert "system/step_seconds" in first


def test_items_that_backward_counts_are_tokens(clock):
    accelerator, tracker, model, optimizer, loader = prepared(clock)
    for batch in loader:
        clock(0.5)
        accelerator.backward(model(batch).sum(), num_items=torch.tensor(7))
        optimizer.step()
        optimizer.zero_grad()
    accelerator.log({"loss": 0.5})
    ((_, values),) = tracker.rows
    assert values["system/tokens_per_second"] == 3 * 7 / (3 * 0.5 + 10 * 0.125)


def test_the_users_value_of_the_same_name_is_kept(clock):
    accelerator, tracker, model, optimizer, loader = prepared(clock)
    for batch in loader:
        clock(1.0)
        accelerator.backward(model(batch).mean())
        optimizer.step()
    accelerator.log({"system/step_seconds": 3})
    assert tracker.rows[0][1]["system/step_seconds"] == 3


def test_nothing_is_added_unless_asked_for(clock):
    tracker = Memory()
    accelerator = Accelerator(cpu=True, log_with=tracker)
    accelerator.init_trackers("run")
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = accelerator.prepare(torch.optim.SGD([weight], lr=0.1))
    accelerator.backward(weight.sum())
    optimizer.step()
    accelerator.log({"loss": 0.5})
    assert tracker.rows == [(None, {"loss": 0.5})]
