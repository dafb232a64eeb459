"""`StepGuard` skips the same steps on all ranks, as one process does that leaves them out."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.nn.functional import mse_loss

from accel_ops.tree import full_tensor
from accel_plugins.deepspeed.plugin import DeepSpeedPlugin
from accel_plugins.fsdp.plugin import FullyShardedDataParallelPlugin
from accel_plugins.kwargs import StepGuard
from accel_plugins.megatron.plugin import MegatronLMPlugin
from accel_plugins.optimizers.host_adamw import HostAdamW
from accel_plugins.optimizers.muon import Muon
from accel_state.errors import UnsupportedError
from accel_train import Accelerator
from harness import distributed

ROWS = 4  # of each rank
STEPS = 7
POISONED, LARGE = 2, 4  # steps of which a row on the last rank is not a number, or a large one
OPTIMIZERS = {
    "adamw": partial(torch.optim.AdamW, lr=0.1),
    "fused": partial(torch.optim.AdamW, lr=0.1, fused=True),
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1, fused=True),
}


def make_model(version=None):
    torch.manual_seed(0)
    layers = torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2)
    return torch.nn.Sequential(*layers).to(torch.float32 if version == 1 else torch.float64)  # FSDP1's norm


def batch_of(step, ranks, *, bad=()):
    generator = torch.Generator().manual_seed(step)
    inputs, targets = (torch.randn(ROWS * ranks, n, generator=generator).double() for n in (3, 2))
    if step in bad:
        targets[-1] = torch.nan if step == POISONED else 1e6
    return inputs, targets


def rows_of(accelerator, step, **options):
    first = ROWS * accelerator.process_index
    return [part[first : first + ROWS] for part in batch_of(step, accelerator.num_processes, **options)]


def prepared(version, make, guard, **options):
    plugin = None if version is None else FullyShardedDataParallelPlugin(fsdp_version=version)
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, kwargs_handlers=[guard], **options)
    model = make_model(version)
    return accelerator, *accelerator.prepare(model, make(model.parameters()))


def train_alone(make, steps, ranks):
    model = make_model()
    optimizer = make(model.parameters())
    for step in steps:
        inputs, targets = batch_of(step, ranks)
        mse_loss(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def take_step(accelerator, model, optimizer, step, clip=None, **options):
    inputs, targets = rows_of(accelerator, step, **options)
    dtype = next(model.parameters()).dtype
    accelerator.backward(mse_loss(model(inputs.to(dtype)), targets.to(dtype)))
    if clip is not None:
        clip(model.parameters())
    optimizer.step()
    optimizer.zero_grad()


def everything_of(model, optimizer):
    """This rank's weights and states, as they are now."""
    states = [value for state in optimizer.state.values() for value in state.values()]
    tensors = [value for value in (*model.parameters(), *states) if isinstance(value, torch.Tensor)]
    return [full_tensor(value.detach()).clone() for value in tensors]


def check_equals(accelerator, model, right, **tolerance):
    found = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        torch.testing.assert_close(dict(found), right.state_dict(), check_dtype=False, **tolerance)


PAIRS = [(version, kind) for version in (None, 1, 2) for kind in OPTIMIZERS]
PAIRS.remove((2, "momentum"))  # torch has no fused SGD for DTensors


@pytest.mark.parametrize(("version", "kind"), PAIRS)
@distributed(world_size=2)
def test_poisoned_and_large_gradients_of_one_rank_are_skipped_on_all(version, kind):
    accelerator, model, optimizer = prepared(version, OPTIMIZERS[kind], StepGuard(max_norm=100.0))
    for step in range(STEPS):
        before = everything_of(model, optimizer)
        take_step(accelerator, model, optimizer, step, bad=(POISONED, LARGE))
        is_bad = step in {POISONED, LARGE}
        assert optimizer.step_was_skipped == accelerator.optimizer_step_was_skipped == is_bad
        if is_bad:
            after = everything_of(model, optimizer)
            assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))
    steps = [step for step in range(STEPS) if step not in {POISONED, LARGE}]
    tolerance = {"rtol": 1e-4, "atol": 1e-4} if version == 1 else {}
    check_equals(accelerator, model, train_alone(OPTIMIZERS[kind], steps, 2), **tolerance)


@pytest.mark.parametrize("kind", [HostAdamW, Muon])
@pytest.mark.parametrize("version", [None, 2])
@distributed(world_size=2)
def test_optimizers_that_step_early_or_communicate_are_skipped(version, kind):
    accelerator, model, optimizer = prepared(version, partial(kind, lr=0.1), StepGuard())
    for step in range(5):
        before = everything_of(model, optimizer)
        take_step(accelerator, model, optimizer, step, bad=(POISONED,))
        after = everything_of(model, optimizer)
        is_same = len(before) == len(after) and all(map(torch.equal, before, after))
        assert is_same == optimizer.step_was_skipped == (step == POISONED)
    assert all(value.isfinite().all() for value in everything_of(model, optimizer))


@distributed(world_size=1)
def test_one_process_skips_the_same_steps():
    accelerator, model, optimizer = prepared(None, OPTIMIZERS["fused"], StepGuard())
    for step in range(STEPS):
        take_step(accelerator, model, optimizer, step, bad=(POISONED, LARGE))
    right = make_model()
    other = OPTIMIZERS["fused"](right.parameters())
    for step in (step for step in range(STEPS) if step != POISONED):  # a large gradient is finite
        inputs, targets = batch_of(step, 1, bad=(LARGE,))
        mse_loss(right(inputs), targets).backward()
        other.step()
        other.zero_grad()
    check_equals(accelerator, model, right)


@pytest.mark.parametrize("how", ["norm", "value"])
@pytest.mark.parametrize("version", [None, 2])
@distributed(world_size=2)
def test_a_large_gradient_is_seen_before_it_is_clipped(version, how):
    accelerator, model, optimizer = prepared(version, OPTIMIZERS["fused"], StepGuard(max_norm=100.0))
    clips = {"norm": accelerator.clip_grad_norm_, "value": accelerator.clip_grad_value_}
    for step in range(STEPS):
        take_step(accelerator, model, optimizer, step, lambda p: clips[how](p, 1e9), bad=(LARGE,))
        assert optimizer.step_was_skipped == (step == LARGE)
    for step in (STEPS, LARGE):
        take_step(accelerator, model, optimizer, step, lambda p: clips[how](p, 0.1), bad=(LARGE,))
        assert optimizer.step_was_skipped == (step == LARGE)


@distributed(world_size=2)
def test_a_step_that_the_program_leaves_out_is_measured_no_more():
    accelerator, model, optimizer = prepared(None, OPTIMIZERS["fused"], StepGuard())
    inputs, targets = rows_of(accelerator, POISONED, bad=(POISONED,))
    accelerator.backward(mse_loss(model(inputs), targets))
    assert accelerator.clip_grad_norm_(model.parameters(), 1.0).isnan()
    optimizer.zero_grad()
    take_step(accelerator, model, optimizer, 0, lambda p: accelerator.clip_grad_norm_(p, 1e9))
    assert not optimizer.step_was_skipped
    check_equals(accelerator, model, train_alone(OPTIMIZERS["fused"], [0], 2))


@pytest.mark.parametrize(("version", "kind"), [(None, "momentum"), (2, "adamw"), (2, "fused")])
@distributed(world_size=2)
def test_one_micro_batch_spoils_its_window_alone(version, kind):
    options = {"gradient_accumulation_steps": 2}
    accelerator, model, optimizer = prepared(version, OPTIMIZERS[kind], StepGuard(), **options)
    for step in (POISONED, 0, 1, 3):  # two windows
        with accelerator.accumulate(model):
            take_step(accelerator, model, optimizer, step, bad=(POISONED,))
    right = make_model()
    other = OPTIMIZERS[kind](right.parameters())
    for step in (1, 3):
        inputs, targets = batch_of(step, 2)
        (mse_loss(right(inputs), targets) / 2).backward()
    other.step()
    check_equals(accelerator, model, right)


@pytest.mark.parametrize("kind", OPTIMIZERS)
@distributed(world_size=2)
def test_all_ranks_give_up_in_the_same_call(kind):
    accelerator, model, optimizer = prepared(None, OPTIMIZERS[kind], StepGuard(give_up_after=2))
    for step in (POISONED, 0, POISONED, 1, POISONED, POISONED):  # one at a time, then two in a row
        take_step(accelerator, model, optimizer, step, bad=(POISONED,))
    before = everything_of(model, optimizer)
    with pytest.raises(FloatingPointError, match=r"skipped 2 steps in a row.*StepGuard\(.*give_up_after=2\)"):
        take_step(accelerator, model, optimizer, 0)
    after = everything_of(model, optimizer)
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))
    accelerator.wait_for_everyone()  # both ranks are here


@distributed(world_size=2)
def test_ranks_decide_alike_where_their_gradients_differ():
    accelerator, model, optimizer = prepared(None, OPTIMIZERS["adamw"], StepGuard(give_up_after=1))
    inner = accelerator.unwrap_model(model)  # its gradients are not averaged
    take_step(accelerator, inner, optimizer, POISONED, bad=(POISONED,))
    with pytest.raises(FloatingPointError):
        take_step(accelerator, inner, optimizer, 0)
    check_equals(accelerator, model, make_model())


@distributed(world_size=2)
def test_schedules_stay_and_each_optimizer_is_judged_alone():
    accelerator = Accelerator(cpu=True, kwargs_handlers=[StepGuard()], step_scheduler_per="update")
    models = [make_model(), make_model()]
    optimizers = [torch.optim.SGD(model.parameters(), lr=1.0) for model in models]
    schedules = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5) for optimizer in optimizers]
    models, optimizers = accelerator.prepare(*models), accelerator.prepare(*optimizers)
    schedules = accelerator.prepare(*schedules)
    for bad in ((POISONED,), ()):
        for model, optimizer, schedule, poison in zip(models, optimizers, schedules, (bad, ()), strict=True):
            take_step(accelerator, model, optimizer, POISONED, bad=poison)
            schedule.step()
    assert [schedule.get_last_lr() for schedule in schedules] == [[0.5], [0.25]]


@distributed(world_size=2)
def test_what_cannot_be_guarded_is_refused():
    guard = StepGuard(max_norm=3.0)
    with pytest.raises(UnsupportedError, match=r"StepGuard\(max_norm=3.0.*'fp16'"):
        Accelerator(cpu=True, mixed_precision="fp16", kwargs_handlers=[guard])
    accelerator, model, optimizer = prepared(None, OPTIMIZERS["adamw"], guard)
    refused = pytest.raises(UnsupportedError, match=r"join_uneven_inputs.*StepGuard")
    with refused, accelerator.join_uneven_inputs([model]):
        pass
    with pytest.raises(UnsupportedError, match=r"closure.*StepGuard"):
        optimizer.step(lambda: 0.0)
    with pytest.raises(UnsupportedError, match=r"lomo_backward.*StepGuard"):
        accelerator.lomo_backward(torch.zeros(()), 0.1)


@pytest.mark.parametrize(
    ("engine", "plugin"),
    [
        ("deepspeed", {"deepspeed_plugin": DeepSpeedPlugin(zero_stage=1)}),
        ("megatron", {"megatron_lm_plugin": MegatronLMPlugin()}),
    ],
)
@distributed(world_size=1)
def test_engines_that_step_themselves_are_refused(engine, plugin):
    with pytest.raises(UnsupportedError, match=f"StepGuard.*STEP_GUARD.*'{engine}'"):
        Accelerator(cpu=True, **plugin, kwargs_handlers=[StepGuard()])
