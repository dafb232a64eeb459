"""Processes that train apart, gradients that travel late, and profiles of all processes."""

from __future__ import annotations

import json
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from accel_plugins.ddp import DistributedDataParallelKwargs
from accel_plugins.kwargs import ProfileKwargs
from accel_state.errors import SettingsError, UnsupportedError
from accel_trackers.general import GeneralTracker, on_main_process
from accel_train import Accelerator
from accel_train.step import LocalSGD
from harness import distributed

RATE = 0.1


def make_model():
    generator = torch.Generator().manual_seed(0)
    model = torch.nn.Linear(3, 1).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model


def batch_of(step, rank):
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(4, 3, generator=generator, dtype=torch.float64)


def loss_of(model, batch):
    return model(batch).square().mean()


def averaged_sgd(steps, every):
    """Plain SGD of every rank in turn, with averages when they are due and at the end."""
    models = [make_model() for _ in range(dist.get_world_size())]

    def average():
        for together in zip(*(model.parameters() for model in models), strict=True):
            mean = torch.stack([one.detach() for one in together]).mean(0)
            for one in together:
                one.data.copy_(mean)

    for step in range(steps):
        for rank, model in enumerate(models):
            model.zero_grad()
            loss_of(model, batch_of(step, rank)).backward()
            for parameter in model.parameters():
                parameter.data -= RATE * parameter.grad
        if (step + 1) % every == 0:
            average()
    average()
    return models[0]


def averaged_windows(micro_batches, window, every):
    """As `averaged_sgd`, with accumulation, an incomplete last window, and a rate halved at every step."""
    world = dist.get_world_size()
    models = [make_model() for _ in range(world)]
    ends = [end for end in range(1, micro_batches + 1) if end % window == 0 or end == micro_batches]
    for step, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
        for rank, model in enumerate(models):
            model.zero_grad()
            for index in range(start, end):
                (loss_of(model, batch_of(index, rank)) / window).backward()
            for parameter in model.parameters():
                parameter.data -= RATE * 0.5**step * parameter.grad
        if (step + 1) % every == 0 or end == micro_batches:
            for together in zip(*(model.parameters() for model in models), strict=True):
                mean = sum(parameter.detach() for parameter in together) / world
                for parameter in together:
                    parameter.data.copy_(mean)
    return models[0]


class Rows(GeneralTracker):
    name = "rows"
    requires_logging_directory = False
    tracker = None

    def __init__(self):
        super().__init__()
        self.rows = []

    @on_main_process
    def log(self, values, step=None, **kwargs):
        self.rows.append(values)


@distributed(world_size=2)
def test_speeds_are_of_one_rank_within_the_context_and_of_all_after_it():
    rows, now = Rows(), [0.0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("accel_train.profiling.perf_counter", lambda: now[0])
        accelerator = Accelerator(cpu=True, log_with=rows, log_system_metrics=True)
        accelerator.init_trackers("run")
        model = make_model()
        loader = DataLoader(torch.zeros(8, 3, dtype=torch.float64), batch_size=2)
        model, optimizer, loader = accelerator.prepare(
            model, torch.optim.SGD(model.parameters(), lr=RATE), loader
        )
        local_sgd = LocalSGD(accelerator, model, local_sgd_steps=2)
        for step, batch in enumerate(loader):
            now[0] += 2.0
            with local_sgd if step == 0 else nullcontext():
                # 7 items on rank 0 and 11 on rank 1.
                accelerator.backward(model(batch).sum(), num_items=7 + 4 * accelerator.process_index)
                optimizer.step()
                optimizer.zero_grad()
            accelerator.log({})
        accelerator._parts.trackers.finish()  # end_training would end the harness's process group, too
    if accelerator.is_main_process:
        speeds = [{name: one for name, one in row.items() if "tokens" in name} for row in rows.rows]
        assert speeds == [{"system/tokens_per_second_per_rank": 3.5}, {"system/tokens_per_second": 9.0}]
    else:
        assert rows.rows == []


@distributed(world_size=2)
def test_running_statistics_are_averaged_at_the_end():
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1)).double())
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=RATE))
    norms = [torch.nn.BatchNorm1d(3).double() for _ in range(2)]
    with LocalSGD(accelerator, model, local_sgd_steps=2) as local_sgd:
        for step in range(3):
            accelerator.backward(loss_of(model, batch_of(step, accelerator.process_index)))
            optimizer.step()
            optimizer.zero_grad()
            local_sgd.step()
            for rank, norm in enumerate(norms):
                norm(batch_of(step, rank))
    norm = accelerator.unwrap_model(model)[0]
    for name in ("running_mean", "running_var"):
        torch.testing.assert_close(
            getattr(norm, name), sum(getattr(expected, name) for expected in norms) / 2
        )
    assert norm.num_batches_tracked == 3


@pytest.mark.parametrize("counted", [False, True])
@distributed(world_size=2)
def test_processes_step_alone_and_meet_every_few_steps(counted):
    accelerator = Accelerator(cpu=True)
    model = make_model()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=RATE))
    with LocalSGD(accelerator, model, local_sgd_steps=3) as local_sgd:
        for step in range(7):
            batch = batch_of(step, accelerator.process_index)
            if counted:
                accelerator.backward(model(batch).square().sum(), num_items=len(batch))
            else:
                accelerator.backward(loss_of(model, batch))
            optimizer.step()
            optimizer.zero_grad()
            local_sgd.step()
    right = averaged_sgd(7, 3)
    for found, wanted in zip(model.parameters(), right.parameters(), strict=True):
        assert torch.allclose(found, wanted, rtol=1e-12)
    # Afterwards gradients travel again, and items are counted over all processes.
    accelerator.backward(model(batch_of(0, accelerator.process_index)).sum(), num_items=4)
    gradients = [torch.empty_like(accelerator.unwrap_model(model).weight.grad) for _ in range(2)]
    dist.all_gather(gradients, accelerator.unwrap_model(model).weight.grad)
    assert torch.equal(*gradients)
    assert torch.allclose(gradients[0], torch.cat([batch_of(0, 0), batch_of(0, 1)]).mean(0), rtol=1e-12)


@distributed(world_size=2)
def test_replica_groups_would_not_be_averaged():
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(make_model())
    parts = accelerator._parts
    parts.strategy.replicas = object()
    with pytest.raises(UnsupportedError, match="averages over one replica group"):
        LocalSGD(accelerator, model, local_sgd_steps=3)


@distributed(world_size=3)
def test_ranks_average_after_whole_windows_with_a_schedule_and_an_odd_number_of_batches():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, step_scheduler_per="update")
    model, world = make_model(), accelerator.num_processes
    samples = torch.cat([batch_of(index, rank) for index in range(7) for rank in range(world)])
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    model, optimizer, schedule, loader = accelerator.prepare(
        model, optimizer, schedule, DataLoader(samples, batch_size=4)
    )
    with LocalSGD(accelerator, model, local_sgd_steps=3) as local_sgd:
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, batch))
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                local_sgd.step()
    assert local_sgd.num_steps == 4
    right = averaged_windows(7, window=2, every=3)
    for found, wanted in zip(model.parameters(), right.parameters(), strict=True):
        assert torch.allclose(found, wanted, rtol=1e-12)


@distributed(world_size=2)
def test_micro_batches_are_no_steps_and_a_disabled_context_does_nothing():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = make_model()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=RATE))
    with LocalSGD(accelerator, model, local_sgd_steps=2, enabled=False) as local_sgd:
        for step in range(4):
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, batch_of(step, accelerator.process_index)))
                optimizer.step()
                optimizer.zero_grad()
                local_sgd.step()
    assert local_sgd.num_steps == 2
    weights = [torch.empty_like(accelerator.unwrap_model(model).weight) for _ in range(2)]
    dist.all_gather(weights, accelerator.unwrap_model(model).weight.detach())
    assert torch.equal(*weights)


@distributed(world_size=2)
def test_an_error_within_is_not_followed_by_a_collective():
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(make_model())
    with pytest.raises(SettingsError, match="local_sgd_steps=0"):
        LocalSGD(accelerator, model, local_sgd_steps=0)
    if accelerator.is_main_process:
        with pytest.raises(ZeroDivisionError), LocalSGD(accelerator, model, local_sgd_steps=1):
            raise ZeroDivisionError
    assert model.require_backward_grad_sync


@distributed(world_size=2)
def test_gradients_of_earlier_forward_passes_can_be_reduced():
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(make_model())
    rank = accelerator.process_index
    with accelerator.no_sync(model):
        first = loss_of(model, batch_of(0, rank))
        second = loss_of(model, batch_of(1, rank))
    accelerator.backward(first)
    with Accelerator.trigger_sync_in_backward(model):
        accelerator.backward(second)
    right = make_model()
    for step in range(2):
        for other in range(2):
            (loss_of(right, batch_of(step, other)) / 2).backward()
    for found, wanted in zip(model.parameters(), right.parameters(), strict=True):
        assert torch.allclose(found.grad, wanted.grad, rtol=1e-12)


@distributed(world_size=2)
def test_unused_parameters_are_not_found_without_a_forward_pass():
    handlers = [DistributedDataParallelKwargs(find_unused_parameters=True)]
    accelerator = Accelerator(cpu=True, kwargs_handlers=handlers)
    model = accelerator.prepare(make_model())
    with (
        pytest.raises(UnsupportedError, match="find_unused_parameters"),
        Accelerator.trigger_sync_in_backward(model),
    ):
        pass


@distributed(world_size=2)
def test_a_model_over_several_devices_is_not_trained_by_several_processes():
    model = make_model()
    model.hf_device_map = {"a": 0, "b": 1}
    with pytest.raises(UnsupportedError, match="device_map"):
        Accelerator(cpu=True).prepare(model)


@distributed(world_size=2)
def test_every_process_writes_a_trace(tmp_path):
    handler = ProfileKwargs(activities=["cpu"], output_trace_dir=str(tmp_path / "traces"))
    accelerator = Accelerator(cpu=True, kwargs_handlers=[handler])
    with accelerator.profile(), torch.profiler.record_function(f"rank {accelerator.process_index}"):
        torch.ones(2) + 1
    for rank in range(2):
        events = json.loads((tmp_path / "traces" / f"profile_{rank}.json").read_text())["traceEvents"]
        assert {event.get("name") for event in events} & {"rank 0", "rank 1"} == {f"rank {rank}"}
