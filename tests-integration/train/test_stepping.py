"""Gradients, schedules and signals between processes."""

from __future__ import annotations

import logging
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from accel_plugins.ddp import DistributedDataParallelKwargs
from accel_plugins.kwargs import GradientAccumulationPlugin, GradScalerKwargs
from accel_train import Accelerator
from harness import distributed


def make_model():
    torch.manual_seed(0)
    return torch.nn.Linear(2, 1, bias=False).double()


def make_input():
    """Another one on every rank."""
    return torch.full((1, 2), float(dist.get_rank() + 1), dtype=torch.float64)


def gradients_agree(model):
    together = [torch.empty_like(model.weight.grad) for _ in range(dist.get_world_size())]
    dist.all_gather(together, model.weight.grad)
    return all(torch.equal(a, b) for a, b in pairwise(together))


@distributed(world_size=2)
def test_models_are_wrapped_and_unwrapped():
    accelerator = Accelerator(cpu=True)
    inner = make_model()
    with torch.no_grad():
        inner.weight.add_(dist.get_rank())
    model = accelerator.prepare(inner)
    assert isinstance(model, DistributedDataParallel)
    assert accelerator.unwrap_model(model) is inner
    assert accelerator.prepare(model) is model
    assert torch.equal(inner.weight, make_model().weight), "everyone has the weights of rank 0"
    assert accelerator.distributed_type.value == "MULTI_CPU"
    assert accelerator.use_distributed


@pytest.mark.parametrize(
    ("how", "warning"),
    [
        ("prepared", None),
        ("unwrapped", "call the model that prepare() returned"),
        ("unfrozen", "unfreeze parameters before prepare()"),
        ("unfrozen all", "unfreeze parameters before prepare()"),
        ("prepared again", None),
    ],
)
@distributed(world_size=2)
def test_gradients_that_ranks_do_not_average_are_reported(how, warning):
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Sequential(make_model(), torch.nn.Tanh(), torch.nn.Linear(1, 1).double())
    frozen = {"unfrozen": model[0], "prepared again": model[0], "unfrozen all": model}.get(how)
    if frozen is not None:
        frozen.requires_grad_(requires_grad=False)
    kind = torch.optim.Adam if how == "unfrozen all" else torch.optim.SGD  # the same text is logged once
    model, optimizer = accelerator.prepare(model, kind(model.parameters(), lr=0.1))
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("accel_plugins.ddp").addHandler(handler)
    try:
        for step in range(3):
            if step == 1 and frozen is not None:
                frozen.requires_grad_(requires_grad=True)
                if how == "prepared again":
                    model = accelerator.prepare(accelerator.unwrap_model(model))
            called = accelerator.unwrap_model(model) if how == "unwrapped" else model
            loss = called(make_input()).square().mean()
            if loss.requires_grad:
                accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    finally:
        logging.getLogger("accel_plugins.ddp").removeHandler(handler)
    weight = accelerator.unwrap_model(model)[0].weight.detach()
    both = accelerator.gather(weight)
    assert torch.equal(both[0], both[1]) == (warning is None)
    if warning is None or not accelerator.is_main_process:
        assert not records
    else:
        (message,) = records
        assert warning in message


@distributed(world_size=2)
def test_a_model_that_is_only_evaluated_is_not_wrapped():
    accelerator = Accelerator(cpu=True)
    inner = make_model()
    assert accelerator.prepare_model(inner, evaluation_mode=True) is inner


@distributed(world_size=2)
def test_options_of_the_wrapper_reach_it():
    accelerator = Accelerator(
        cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)]
    )
    assert accelerator.prepare(make_model()).find_unused_parameters


@distributed(world_size=2)
def test_gradients_differ_within_no_sync_and_agree_after():
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(make_model())
    inner = accelerator.unwrap_model(model)
    with accelerator.no_sync(model):
        accelerator.backward(model(make_input()).sum())
    assert inner.weight.grad.tolist() == [[dist.get_rank() + 1] * 2]
    assert not gradients_agree(inner)
    accelerator.backward(model(make_input()).sum())
    assert gradients_agree(inner)
    assert inner.weight.grad.tolist() == [[3, 3]]


@distributed(world_size=2)
def test_several_models_accumulate_together():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    first, second = accelerator.prepare(make_model(), make_model())
    for _ in range(2):
        with accelerator.accumulate(first, second):
            accelerator.backward(first(make_input()).sum() + second(2 * make_input()).sum())
        inner = [accelerator.unwrap_model(model) for model in (first, second)]
        assert [gradients_agree(one) for one in inner] == [accelerator.sync_gradients] * 2
    assert [one.weight.grad[0, 0].item() for one in inner] == [1.5, 3]


@distributed(world_size=2)
def test_models_of_different_optimizers_have_their_own_windows():
    """Two networks that are trained alternately step equally often, with the gradients of both ranks."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    models = [make_model() for _ in range(2)]
    pairs = [accelerator.prepare(m, torch.optim.SGD(m.parameters(), lr=1.0)) for m in models]
    steps = [0, 0]
    for index in range(6):
        for turn, (model, optimizer) in enumerate(pairs):
            with accelerator.accumulate(model):
                accelerator.backward(model((index + turn) * make_input()).sum())
                if accelerator.sync_gradients:
                    steps[turn] += 1
                    assert gradients_agree(models[turn])
                    assert models[turn].weight.grad[0, 0].item() == 1.5 * (2 * index - 1 + 2 * turn) / 2
                optimizer.step()
                optimizer.zero_grad()
    assert steps == [3, 3]


@distributed(world_size=2)
def test_a_plain_model_is_evaluated_within_join_uneven_inputs():
    """As an average of weights beside the trained model: it cannot join, and does not need to."""
    accelerator = Accelerator(cpu=True)
    average = accelerator.prepare_model(make_model(), evaluation_mode=True)
    with accelerator.join_uneven_inputs([average], even_batches=False), torch.no_grad():
        outputs = [average(make_input()).item() for _ in range(2 - dist.get_rank())]
    assert len(outputs) == 2 - dist.get_rank()


@distributed(world_size=2)
def test_gradients_can_be_synchronised_in_every_micro_batch():
    plugin = GradientAccumulationPlugin(num_steps=2, sync_each_batch=True)
    accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
    model = accelerator.prepare(make_model())
    inner = accelerator.unwrap_model(model)
    for expected in (0.75, 1.5):
        with accelerator.accumulate(model):
            accelerator.backward(model(make_input()).sum())
        assert inner.weight.grad.tolist() == [[expected] * 2]


@distributed(world_size=2)
def test_the_clipped_norm_is_the_same_everywhere():
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(make_model())
    accelerator.backward(model(make_input()).sum())
    norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
    assert norm.item() == pytest.approx(1.5 * 2**0.5)
    assert accelerator.unwrap_model(model).weight.grad.norm().item() == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize(("split", "steps"), [(False, 2), (True, 1)])
@distributed(world_size=2)
def test_a_schedule_advances_once_per_process_unless_batches_are_split(split, steps):
    accelerator = Accelerator(cpu=True, split_batches=split)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, schedule)
    accelerator.backward(model(make_input()).sum())
    optimizer.step()
    scheduler.step()
    assert schedule.last_epoch == steps
    assert scheduler.get_last_lr() == [1 / (1 + steps)]


@distributed(world_size=2)
def test_an_overflow_on_one_rank_skips_the_step_on_all():
    accelerator = Accelerator(
        cpu=True, mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=8.0)]
    )
    model = make_model().float()
    before = model.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, schedule)
    loss = model(make_input().float()).sum() * (float("inf") if accelerator.is_last_process else 1.0)
    accelerator.backward(loss)
    optimizer.step()
    scheduler.step()
    assert accelerator.optimizer_step_was_skipped
    assert schedule.last_epoch == 0
    assert torch.equal(accelerator.unwrap_model(model).weight, before)


@distributed(world_size=4)
def test_a_trigger_raised_on_one_process_is_seen_by_all_and_then_lowered():
    accelerator = Accelerator(cpu=True)
    assert not accelerator.check_trigger()
    if accelerator.process_index == 2:
        accelerator.set_trigger()
    assert accelerator.check_trigger()
    assert not accelerator.check_trigger()


@distributed(world_size=2)
def test_collectives_of_the_accelerator():
    accelerator = Accelerator(cpu=True)
    rank = accelerator.process_index
    gathered = accelerator.gather({"a": torch.full((rank + 1,), rank), "b": torch.tensor(rank)})
    assert gathered["a"].tolist() == [0, 1, 1]
    assert gathered["b"].tolist() == [0, 1]
    assert accelerator.reduce(torch.tensor([1.0, rank]), "mean", scale=2.0).tolist() == [2, 1]
    padded = accelerator.pad_across_processes(torch.ones(1, rank + 1), dim=1, pad_index=9, pad_first=True)
    assert padded.tolist() == [[9, 1], [1, 1]][rank : rank + 1]


@distributed(world_size=2)
def test_every_process_gets_its_share():
    accelerator = Accelerator(cpu=True)
    with accelerator.split_between_processes([1, 2, 3], apply_padding=True) as mine:
        assert mine == ([1, 2] if accelerator.is_main_process else [3, 3])
    ran = accelerator.on_process(process_index=1)(lambda: "ran")()
    assert ran == ("ran" if accelerator.is_last_process else None)
    with accelerator.main_process_first():
        pass


@distributed(world_size=2)
def test_two_loaders_end_their_own_windows():
    """The end of an inner evaluation loader does not end the accumulation of the outer one."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    training, evaluation = accelerator.prepare(
        DataLoader(torch.arange(8.0), batch_size=1), DataLoader(torch.arange(2.0), batch_size=1)
    )
    synced = []
    for _ in training:
        for _ in evaluation:
            pass
        with accelerator.accumulate():
            synced.append(accelerator.sync_gradients)
    assert synced == [False, False, True, True]


@pytest.mark.parametrize(("step_per", "steps"), [("update", [1, 2]), ("sample", [6, 10])])
@distributed(world_size=2)
def test_a_schedule_counts_updates_or_the_samples_of_all_processes(step_per, steps):
    accelerator = Accelerator(cpu=True, step_scheduler_per=step_per)
    optimizer = torch.optim.SGD(make_model().parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    optimizer, scheduler, loader = accelerator.prepare(
        optimizer, schedule, DataLoader(torch.arange(10.0), batch_size=3)
    )
    seen = []
    for _ in loader:
        optimizer.step()
        scheduler.step()
        seen.append(schedule.last_epoch)
    assert seen == steps
