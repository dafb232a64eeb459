"""The scheduler wrapper: when the schedule moves, and by how much."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from accel_plugins.optimizer import AcceleratedScheduler
from accel_state import runtime
from accel_state.accelerator_state import GradientState
from accel_state.errors import SettingsError
from accel_state.topology import Topology
from accel_train import Accelerator


@pytest.fixture
def four_processes(monkeypatch):
    topology = Topology(rank=0, world_size=4, local_rank=0, local_world_size=4)
    monkeypatch.setattr(runtime, "active", runtime.Runtime(topology=topology))


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


def test_it_advances_once_per_update_if_told_so(four_processes, caplog):
    scheduler, _ = make(step_per="update")
    scheduler.step()
    assert scheduler.scheduler.last_epoch == 1
    assert not caplog.records


def test_the_default_clock_is_explained_to_who_reads_the_log(four_processes, caplog):
    make()
    assert not [record for record in caplog.records if record.levelno > logging.INFO]
    caplog.set_level(logging.INFO, "accel_plugins.optimizer")
    make()
    (record,) = caplog.records
    assert "4 steps per optimizer step" in record.message
    assert "step_scheduler_per='update'" in record.message
    make(step_per="process")
    make(split_batches=True)
    make(step_with_optimizer=False)
    assert len(caplog.records) == 1


class Numbers(IterableDataset):
    def __iter__(self):
        return iter(range(10))


@pytest.mark.parametrize(
    "kind", [torch.optim.lr_scheduler.LambdaLR, torch.optim.lr_scheduler.MultiplicativeLR]
)
@pytest.mark.parametrize(
    ("data", "options", "counts"),
    [
        (list(range(10)), {"batch_size": 4}, [4, 8, 10]),
        (list(range(10)), {"batch_size": 4, "drop_last": True}, [4, 8]),
        (list(range(10)), {"batch_size": 5}, [5, 10]),
        (Numbers(), {"batch_size": 4}, [4, 8, 10]),
        (Numbers(), {"batch_size": 4, "drop_last": True}, [4, 8]),
    ],
)
def test_it_can_advance_by_the_samples_that_were_read(kind, data, options, counts):
    accelerator = Accelerator(cpu=True, step_scheduler_per="sample")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    optimizer, schedule, loader = accelerator.prepare(
        optimizer, kind(optimizer, lambda step: 0.9), DataLoader(data, **options)
    )
    seen = []
    for _ in loader:
        optimizer.step()
        schedule.step()
        seen.append(schedule.scheduler.last_epoch)
    assert seen == counts
    rate = 0.9 if kind is torch.optim.lr_scheduler.LambdaLR else 0.9 ** counts[-1]
    assert schedule.get_last_lr() == pytest.approx([rate])


def test_samples_of_a_whole_window_count():
    accelerator = Accelerator(cpu=True, step_scheduler_per="sample", gradient_accumulation_steps=2)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    optimizer, schedule, loader = accelerator.prepare(
        optimizer, schedule, DataLoader(list(range(11)), batch_size=4)
    )
    seen = []
    for _ in loader:
        with accelerator.accumulate():
            optimizer.step()
            schedule.step()
            seen.append(schedule.scheduler.last_epoch)
    assert seen == [0, 8, 11]


def test_one_schedule_may_have_another_clock():
    accelerator = Accelerator(cpu=True)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    optimizer = accelerator.prepare(optimizer)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    with pytest.raises(ValueError, match="no prepared loader"):
        accelerator.prepare_scheduler(schedule, step_per="sample").step()


def test_samples_of_batches_of_any_size_cannot_be_counted():
    accelerator = Accelerator(cpu=True, step_scheduler_per="sample")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)

    class Uneven(BatchSampler):
        def __iter__(self):
            return iter([[0, 1, 2], [3]])

        def __len__(self):
            return 2

    loader = DataLoader(list(range(4)), batch_sampler=Uneven([], 2, drop_last=False))
    optimizer, schedule, loader = accelerator.prepare(
        optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0), loader
    )
    for _ in loader:
        with pytest.raises(ValueError, match="another size"):
            schedule.step()


def test_a_clock_that_is_none_or_has_no_effect_is_refused():
    with pytest.raises(SettingsError, match="step_scheduler_per='epoch'"):
        Accelerator(cpu=True, step_scheduler_per="epoch")
    with pytest.raises(SettingsError, match="Remove one of the two"):
        Accelerator(cpu=True, step_scheduler_per="update", step_scheduler_with_optimizer=False)
    with pytest.raises(SettingsError, match="no effect"):
        make(step_per="update", step_with_optimizer=False)


def on_plateau(optimizer):
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)


def in_sequence(optimizer):
    warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 3)
    decay = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    return torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, decay], [3])


def in_a_chain(optimizer):
    warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 3)
    return torch.optim.lr_scheduler.ChainedScheduler(
        [warm, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]
    )


@pytest.mark.parametrize(
    ("make_schedule", "metric"), [(on_plateau, (1.0,)), (in_sequence, ()), (in_a_chain, ())]
)
def test_schedules_of_every_class_move_at_the_end_of_each_window(make_schedule, metric):
    plain = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    plain_schedule, expected = make_schedule(plain), []
    for micro_batch in range(1, 10):
        if micro_batch in {2, 4, 6, 8, 9}:  # the loader ends with the ninth
            plain.step()
            plain_schedule.step(*metric)
        expected.append(plain.param_groups[0]["lr"])

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    schedule = make_schedule(optimizer)
    optimizer, schedule, loader = accelerator.prepare(optimizer, schedule, DataLoader(range(9)))
    rates = []
    for _ in loader:
        with accelerator.accumulate():
            optimizer.step()
            schedule.step(*metric)
            rates.append(optimizer.param_groups[0]["lr"])
    assert rates == expected


def test_a_metric_is_one_observation_also_where_samples_count():
    accelerator = Accelerator(cpu=True, step_scheduler_per="sample")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=2)
    optimizer, schedule, loader = accelerator.prepare(optimizer, schedule, DataLoader(range(8), batch_size=2))
    rates = []
    for _ in loader:
        optimizer.step()
        schedule.step(1.0)
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx([0.1, 0.1, 0.1, 0.01])


def test_a_step_that_a_script_marks_as_skipped_holds_the_schedule():
    accelerator = Accelerator(cpu=True)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    optimizer, schedule = accelerator.prepare(optimizer, schedule)
    optimizer.step()
    optimizer._is_overflow = True
    schedule.step()
    assert optimizer.step_was_skipped
    assert accelerator.optimizer_step_was_skipped
    assert schedule.get_last_lr() == [1.0]
    optimizer._is_overflow = False
    schedule.step()
    assert schedule.get_last_lr() == [0.5]
