"""The scheduler wrapper: when the schedule moves, and by how much."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from accel_state import runtime
from accel_state.gradient_state import GradientState
from accel_state.topology import Topology
from accel_train.scheduler import AcceleratedScheduler


@pytest.fixture
def four_processes(monkeypatch):
    topology = Topology(rank=0, world_size=4, local_rank=0, local_world_size=4)
    monkeypatch.setattr(runtime, "_current", runtime.Runtime(topology=topology))


def make(schedule=None, **options):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    make_schedule = schedule or (lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda n: 1 / (1 + n)))
    wrapped = SimpleNamespace(step_was_skipped=False)
    scheduler = AcceleratedScheduler(make_schedule(optimizer), wrapped, **options)
    optimizer.step()
    return scheduler, wrapped


def test_it_advances_once_per_process(four_processes):
    scheduler, _ = make()
    scheduler.step()
    assert scheduler.scheduler.last_epoch == 4
    assert scheduler.get_last_lr() == [1 / 5]


def test_it_advances_once_if_batches_are_split(four_processes):
    scheduler, _ = make(split_batches=True)
    scheduler.step()
    assert scheduler.scheduler.last_epoch == 1


def test_it_advances_once_on_one_process():
    scheduler, _ = make()
    scheduler.step()
    assert scheduler.get_last_lr() == [1 / 2]


def test_it_stays_while_gradients_accumulate_and_after_a_skipped_step():
    scheduler, optimizer = make()
    GradientState().sync_gradients = False
    scheduler.step()
    GradientState().sync_gradients = True
    optimizer.step_was_skipped = True
    scheduler.step()
    assert scheduler.scheduler.last_epoch == 0
    optimizer.step_was_skipped = False
    scheduler.step()
    assert scheduler.scheduler.last_epoch == 1


def test_one_of_several_optimizers_that_skipped_holds_it():
    first, second = SimpleNamespace(step_was_skipped=False), SimpleNamespace(step_was_skipped=True)
    scheduler, _ = make()
    several = AcceleratedScheduler(scheduler.scheduler, [first, second])
    several.step()
    assert several.scheduler.last_epoch == 0


def test_without_step_with_optimizer_every_call_is_forwarded(four_processes):
    scheduler, optimizer = make(step_with_optimizer=False)
    GradientState().sync_gradients = False
    optimizer.step_was_skipped = True
    scheduler.step()
    assert scheduler.scheduler.last_epoch == 1


def test_a_one_cycle_schedule_is_never_stepped_past_its_end(four_processes):
    scheduler, _ = make(
        lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=6)
    )
    for _ in range(5):
        scheduler.step()
    assert scheduler.scheduler.last_epoch == 6


def test_arguments_reach_the_wrapped_scheduler():
    scheduler, _ = make(
        lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.1)
    )
    scheduler.step(1.0)
    scheduler.step(2.0)
    assert scheduler.get_last_lr() == pytest.approx([0.1])


def test_its_state_is_that_of_the_wrapped_scheduler():
    scheduler, _ = make()
    scheduler.step()
    other, _ = make()
    other.load_state_dict(scheduler.state_dict())
    assert other.scheduler.last_epoch == 1
    assert other.state_dict()["_last_lr"] == scheduler.state_dict()["_last_lr"]
