"""Training with `Accelerator` on one process."""

from __future__ import annotations

import copy
import logging
import os
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from accel_ops.modules import has_compiled_regions
from accel_plugins.kwargs import AutocastKwargs, GradientAccumulationPlugin, GradScalerKwargs
from accel_state.errors import SettingsError
from accel_train import AcceleratedOptimizer, AcceleratedScheduler, Accelerator
from accel_train.accelerator import build


def make_data(samples=20):
    generator = torch.Generator().manual_seed(0)
    return (
        torch.randn(samples, 3, generator=generator, dtype=torch.float64),
        torch.randn(samples, 1, generator=generator, dtype=torch.float64),
    )


def make_model():
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)).double()


def make_training(samples=20, batch=4):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    return model, optimizer, scheduler, DataLoader(TensorDataset(*make_data(samples)), batch_size=batch)


def calls_of_an_epoch(steps):
    """Count the calls of our functions in an epoch of one sample a step."""
    accelerator = Accelerator(cpu=True)
    model, optimizer, scheduler, loader = accelerator.prepare(*make_training(steps, batch=1))
    called = 0

    def count(frame, event, _):
        nonlocal called
        called += event == "call" and f"{os.sep}accel_" in frame.f_code.co_filename

    sys.setprofile(count)
    try:
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                accelerator.backward(mse_loss(model(inputs), targets))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    finally:
        sys.setprofile(None)
    return called


def test_a_step_calls_few_functions_of_ours():
    assert calls_of_an_epoch(30) - calls_of_an_epoch(10) <= 20 * 11


def test_the_prepared_loop_equals_the_bare_loop():
    model, optimizer, scheduler, loader = make_training()
    for inputs, targets in loader:
        mse_loss(model(inputs), targets).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()

    accelerator = Accelerator(cpu=True)
    other, optimizer, scheduler, loader = accelerator.prepare(*make_training())
    for inputs, targets in loader:
        with accelerator.accumulate(other):
            accelerator.backward(mse_loss(other(inputs), targets))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    for expected, parameter in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(expected, parameter)


def test_prepare_takes_any_order_and_passes_other_things_through():
    accelerator = Accelerator(cpu=True)
    model, optimizer, scheduler, loader = make_training()
    other = object()
    results = accelerator.prepare(other, scheduler, loader, optimizer, model, None)
    assert isinstance(results, tuple)
    assert results[0] is other
    assert isinstance(results[1], AcceleratedScheduler)
    assert results[1].optimizers == [results[3]]
    assert len(results[2]) == 5
    assert isinstance(results[3], AcceleratedOptimizer)
    assert results[4] is model
    assert results[5] is None
    assert accelerator.prepare() == ()


def test_preparing_again_is_harmless():
    accelerator = Accelerator(cpu=True)
    first = accelerator.prepare(*make_training())
    again = accelerator.prepare(*first)
    assert all(a is b for a, b in zip(first, again, strict=True))
    assert accelerator.prepare_model(first[0]) is first[0]
    assert accelerator.prepare_optimizer(first[1]) is first[1]
    assert accelerator.prepare_scheduler(first[2]) is first[2]
    assert accelerator.prepare_data_loader(first[3]) is first[3]
    assert len(accelerator._models) == len(accelerator._optimizers) == 1
    assert len(accelerator._schedulers) == len(accelerator._dataloaders) == 1


def test_another_accelerator_may_prepare_the_same_objects_anew():
    prepared = Accelerator(cpu=True).prepare(*make_training())
    model, optimizer, scheduler, loader = Accelerator(cpu=True).prepare(*prepared)
    assert isinstance(optimizer.optimizer, torch.optim.SGD)
    assert isinstance(scheduler.scheduler, torch.optim.lr_scheduler.StepLR)
    assert model is prepared[0]
    assert sum(len(inputs) for inputs, _ in loader) == 20


def test_each_kind_can_be_prepared_alone():
    accelerator = Accelerator(cpu=True)
    model, optimizer, scheduler, loader = make_training()
    assert accelerator.prepare_model(model, evaluation_mode=True) is model
    prepared = accelerator.prepare_optimizer(optimizer)
    assert accelerator.prepare_scheduler(scheduler).optimizers == [prepared]
    assert len(accelerator.prepare_data_loader(loader, device_placement=False)) == 5
    with pytest.raises(TypeError, match="'a model' cannot be prepared"):
        accelerator.prepare_model("a model")


def test_a_scheduler_follows_the_optimizer_it_was_made_for_else_all():
    accelerator = Accelerator(cpu=True)
    first, second = (torch.optim.SGD(make_model().parameters(), lr=0.1) for _ in range(2))
    schedule = torch.optim.lr_scheduler.StepLR(second, 1)
    first, second, scheduler = accelerator.prepare(first, second, schedule)
    assert scheduler.optimizers == [second]
    stranger = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(make_model().parameters(), lr=0.1), 1)
    assert accelerator.prepare(stranger).optimizers == [first, second]


def test_a_wrong_list_of_placements_is_refused():
    with pytest.raises(ValueError, match="has 1 entries for the 2 arguments"):
        Accelerator(cpu=True).prepare(make_model(), None, device_placement=[True])


def train_accumulating(accelerator, samples, batch):
    model, optimizer, scheduler, loader = accelerator.prepare(*make_training(samples, batch))
    synced = []
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            accelerator.backward(mse_loss(model(inputs), targets))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        synced.append(accelerator.sync_gradients)
    return model, scheduler.scheduler, synced


def test_accumulated_micro_batches_equal_one_batch():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, schedule, synced = train_accumulating(accelerator, 16, 4)
    assert synced == [False, True, False, True]
    assert schedule.last_epoch == 2

    whole, optimizer, _, loader = make_training(16, 8)
    for inputs, targets in loader:
        mse_loss(whole(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    for expected, parameter in zip(whole.parameters(), model.parameters(), strict=True):
        assert torch.allclose(expected, parameter, rtol=0, atol=1e-12)


def test_the_end_of_a_loader_ends_a_window_unless_told_otherwise():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    assert train_accumulating(accelerator, 12, 4)[2] == [False, True, True]
    plugin = GradientAccumulationPlugin(num_steps=2, sync_with_dataloader=False)
    accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
    assert train_accumulating(accelerator, 12, 4)[2] == [False, True, False]
    assert accelerator.step == 1


def test_an_interrupted_window_does_not_hold_the_next_accelerator():
    with pytest.raises(KeyboardInterrupt):
        interrupt(Accelerator(cpu=True, gradient_accumulation_steps=4))
    accelerator = Accelerator(cpu=True)
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = accelerator.prepare(torch.optim.SGD([weight], lr=0.5))
    accelerator.backward(weight.sum())
    optimizer.step()
    assert accelerator.sync_gradients
    assert weight.item() == 0.5


def interrupt(accelerator):
    with accelerator.accumulate():
        raise KeyboardInterrupt


def test_breaking_out_of_a_loader_leaves_no_loader_active():
    accelerator = Accelerator(cpu=True)
    _, _, _, loader = accelerator.prepare(*make_training())
    for _ in loader:
        break
    assert accelerator.gradient_state.active_dataloader is None


def test_clipping_returns_the_norm_before():
    accelerator = Accelerator(cpu=True)
    weight = torch.nn.Parameter(torch.zeros(2))
    weight.grad = torch.tensor([3.0, 4.0])
    assert accelerator.clip_grad_norm_([weight], 1.0).item() == 5
    assert torch.allclose(weight.grad, torch.tensor([0.6, 0.8]))
    accelerator.clip_grad_value_([weight], 0.7)
    assert torch.allclose(weight.grad, torch.tensor([0.6, 0.7]))


def make_half(**options):
    accelerator = Accelerator(
        cpu=True, mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=8.0)], **options
    )
    model = torch.nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    return accelerator, *accelerator.prepare(model, optimizer, schedule)


def test_float16_scales_the_loss_and_steps_with_true_gradients():
    accelerator, model, optimizer, scheduler = make_half()
    loss = model(torch.tensor([[1.0, 2.0]])).sum()
    assert loss.dtype == torch.float32
    accelerator.backward(loss)
    assert model.weight.grad.tolist() == [[8, 16]]
    assert accelerator.clip_grad_norm_(model.parameters(), 1e9).item() == pytest.approx(5**0.5)
    assert model.weight.grad.tolist() == [[1, 2]]
    optimizer.step()
    scheduler.step()
    assert model.weight.tolist() == [[0.5, 0.0]]
    assert not accelerator.optimizer_step_was_skipped
    assert scheduler.get_last_lr() == [0.25]
    assert accelerator.scaler.get_scale() == 8


def test_an_overflow_skips_the_step_and_the_schedule():
    accelerator, model, optimizer, scheduler = make_half()
    accelerator.backward(model(torch.tensor([[1.0, 2.0]])).sum() * float("inf"))
    optimizer.step()
    scheduler.step()
    assert accelerator.optimizer_step_was_skipped
    assert model.weight.tolist() == [[1, 1]]
    assert scheduler.get_last_lr() == [0.5]


def test_scaled_gradients_cannot_be_clipped_while_they_accumulate():
    accelerator, model, optimizer, _ = make_half(gradient_accumulation_steps=2)
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.tensor([[1.0, 2.0]])).sum())
        with pytest.raises(RuntimeError, match=r"if accelerator\.sync_gradients"):
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.tensor([[1.0, 2.0]])).sum())
        accelerator.unscale_gradients(optimizer)
    assert model.weight.grad.tolist() == [[1, 2]]


def test_bfloat16_computes_in_bfloat16_and_returns_float32():
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    inside = []
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Identity())
    model[1].register_forward_hook(lambda module, args, output: inside.append(output.dtype))
    names = list(model.state_dict())
    model = accelerator.prepare(model)
    assert model(torch.ones(1, 2)).dtype == torch.float32
    assert inside == [torch.bfloat16]
    assert list(model.state_dict()) == names
    with accelerator.autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16
    with accelerator.autocast(AutocastKwargs(enabled=False)):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32
    unwrapped = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    unwrapped(torch.ones(1, 2))
    assert inside == [torch.bfloat16, torch.float32]


def test_a_copy_of_a_prepared_model_trains_on_its_own():
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model = accelerator.prepare(torch.nn.Linear(2, 1))
    clone = copy.deepcopy(model)
    with torch.no_grad():
        clone.weight.zero_()
        clone.bias.zero_()
    assert clone(torch.ones(1, 2)).item() == 0
    assert model(torch.ones(1, 2)).item() != 0


def test_a_model_is_compiled_as_the_plugin_says_and_unwrapped():
    accelerator = Accelerator(cpu=True, dynamo_backend="eager")
    inner = torch.nn.Linear(2, 1)
    model = accelerator.prepare(inner)
    assert model is not inner
    assert torch.equal(model(torch.ones(1, 2)), inner(torch.ones(1, 2)))
    assert accelerator.prepare(model) is model
    assert accelerator.unwrap_model(model) is model
    assert accelerator.unwrap_model(model, keep_torch_compile=False) is inner


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's own
def test_regions_are_compiled_in_place_as_the_environment_says(monkeypatch):
    monkeypatch.setenv("ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION", "true")
    accelerator = Accelerator(cpu=True, dynamo_backend="eager")
    blocks = [torch.nn.TransformerEncoderLayer(4, 1, 4) for _ in range(3)]
    inner = torch.nn.Sequential(torch.nn.Linear(2, 4), *blocks)
    names = [*inner.state_dict()]
    model = accelerator.prepare(inner)
    assert model is inner
    assert [has_compiled_regions(part) for part in model] == [False, True, True, True]
    assert [*model.state_dict()] == names
    assert accelerator.unwrap_model(model, keep_torch_compile=False) is inner
    compiled = [part._compiled_call_impl for part in blocks]
    Accelerator(cpu=True, dynamo_backend="eager").prepare(model)
    assert [part._compiled_call_impl for part in blocks] == compiled, "once is enough"
    assert model(torch.ones(1, 2)).isfinite().all()


def test_free_memory_forgets_everything_and_gives_back_nothing():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    model, optimizer, scheduler, loader = accelerator.prepare(*make_training())
    with accelerator.accumulate(model):
        pass
    assert accelerator.step == 1
    model, optimizer, scheduler, loader = accelerator.free_memory(model, optimizer, scheduler, loader)
    assert model is optimizer is scheduler is loader is None
    assert accelerator.step == 0
    assert accelerator._models == accelerator._optimizers == []
    assert accelerator._schedulers == accelerator._dataloaders == []
    assert accelerator.clear("something") == [None]


def test_joining_uneven_inputs_alone_changes_nothing_but_even_batches():
    accelerator = Accelerator(cpu=True)
    model, _, _, loader = accelerator.prepare(*make_training())
    with accelerator.join_uneven_inputs([model], even_batches=False):
        assert sum(len(inputs) for inputs, _ in loader) == 20


def test_collectives_alone_are_the_identity():
    accelerator = Accelerator(cpu=True)
    data = {"a": torch.arange(3), "b": [torch.ones(2, 2)]}
    assert torch.equal(accelerator.gather(data)["a"], data["a"])
    assert torch.equal(accelerator.reduce(data)["b"][0], data["b"][0])
    assert accelerator.reduce(torch.ones(2), "mean", scale=3.0).tolist() == [3, 3]
    assert torch.equal(accelerator.pad_across_processes(data["a"], pad_index=7), data["a"])
    assert accelerator.gather_for_metrics(["x", "y"]) == ["x", "y"]


def test_process_helpers_alone():
    accelerator = Accelerator(cpu=True)
    for decorate in (
        accelerator.on_main_process,
        accelerator.on_local_main_process,
        accelerator.on_last_process,
        accelerator.on_process(process_index=0),
        accelerator.on_local_process(local_process_index=0),
    ):
        assert decorate(lambda: "ran")() == "ran"
    with accelerator.main_process_first(), accelerator.local_main_process_first():
        accelerator.wait_for_everyone()
    with accelerator.split_between_processes([1, 2], apply_padding=True) as items:
        assert items == [1, 2]


def test_it_prints(capsys):
    Accelerator(cpu=True).print("once", "more", sep="-")
    assert capsys.readouterr().out == "once-more\n"


def test_an_accelerator_imports_no_slow_part_that_it_does_not_use():
    """Neither when it is made nor, of the compiler, when it prepares, trains and unwraps a model."""
    late = "torch.distributed.tensor", "sympy", "torch.distributed.algorithms.ddp_comm_hooks.default_hooks"
    code = (
        "import sys, torch; before = {*sys.modules};"
        "from accel_train import Accelerator; accelerator = Accelerator(cpu=True);"
        f"print(*sorted(({{*sys.modules}} - before) & {{*{late!r}}}));"
        "model = accelerator.prepare(torch.nn.Linear(1, 1));"
        "accelerator.backward(model(torch.ones(1, 1)).sum());"
        "accelerator.unwrap_model(model); print('torch._dynamo' in sys.modules)"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout == "\nFalse\n"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_in_half_precision_trains_as_it_is(dtype):
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(2, 1).to(dtype)
    before = model.weight.detach().clone()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
    output = model(torch.ones(3, 2, dtype=dtype))
    assert output.dtype is dtype
    accelerator.backward(output.mean())
    optimizer.step()
    assert model.weight.dtype is dtype
    assert torch.equal(model.weight, before - 0.5)


def test_float16_on_the_cpu_is_float32_unless_a_scaler_is_asked_for(caplog, monkeypatch):
    monkeypatch.setattr(build.logger, "_logged", set())  # It is logged once in a process.
    accelerator = Accelerator(cpu=True, mixed_precision="fp16")
    model = torch.nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
    computed = []
    model.register_forward_hook(lambda module, inputs, output: computed.append(output.dtype))
    accelerator.backward(model(torch.ones(1, 2)).sum())
    assert computed == [torch.float32]
    assert model.weight.grad.tolist() == [[1, 1]]
    assert accelerator.mixed_precision == "fp16"
    assert accelerator.native_amp is False
    assert accelerator.scaler is None
    with accelerator.autocast():
        assert not torch.is_autocast_enabled("cpu")
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    assert not accelerator.optimizer_step_was_skipped
    assert "computes in float32" in caplog.text


def scale_half():
    """Prepare a model in float16 and its optimizer, under loss scaling, and compute gradients of 1."""
    accelerator = Accelerator(
        cpu=True, mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=4.0)]
    )
    model = torch.nn.Linear(2, 1).half()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
    accelerator.backward(model(torch.ones(1, 2)).sum())
    return accelerator, model, optimizer


def test_loss_scaling_refuses_gradients_in_float16():
    accelerator, model, optimizer = scale_half()
    with pytest.raises(SettingsError, match="parameters in float16"):
        optimizer.step()
    with pytest.raises(SettingsError, match="parameters in float16"):
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
    teacher = accelerator.prepare_model(torch.nn.Linear(2, 1).half(), evaluation_mode=True)
    assert teacher(torch.ones(1, 2)).dtype is torch.float32


@pytest.mark.parametrize("clips", [False, True])
def test_gradients_in_float16_are_unscaled_by_the_function_that_a_program_puts_in_place(clips):
    accelerator, model, optimizer = scale_half()
    original, before = accelerator.scaler._unscale_grads_, model.weight.detach().clone()

    def allowing(optimizer, inv_scale, found_inf, allow_fp16):  # as sd-scripts do
        return original(optimizer, inv_scale, found_inf, True)

    accelerator.scaler._unscale_grads_ = allowing
    if clips:
        norm = accelerator.clip_grad_norm_(model.parameters(), 100.0)
        assert norm.item() == pytest.approx(3**0.5, rel=1e-3)
    optimizer.step()
    assert model.weight.dtype is torch.float16
    torch.testing.assert_close(model.weight, before - 0.5)


def test_a_skipped_step_is_reported_and_moves_no_schedule():
    handlers = [GradScalerKwargs(init_scale=4.0)]
    accelerator = Accelerator(cpu=True, mixed_precision="fp16", kwargs_handlers=handlers)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, schedule)
    skipped, positions = [], []
    for factor in (float("inf"), 1.0, float("nan"), 1.0):
        accelerator.backward(factor * model(torch.ones(1, 1)).sum())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        skipped.append(accelerator.optimizer_step_was_skipped)
        positions.append(schedule.last_epoch)
    assert skipped == [True, False, True, False]
    assert positions == [0, 1, 1, 2]


@pytest.mark.parametrize("pack", [list, tuple])
def test_objects_in_a_list_are_passed_through_with_a_warning(pack, caplog):
    accelerator, model = Accelerator(cpu=True), nn.Linear(1, 1)
    given = pack([model, torch.optim.SGD(model.parameters(), lr=0.1)])
    with caplog.at_level(logging.WARNING):
        assert accelerator.prepare(given) is given
        assert accelerator.prepare(nn.Linear) is nn.Linear
        assert accelerator.prepare([1, "x"], int) == ([1, "x"], int)
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2
    assert f"the {pack.__name__} that contains a Linear" in told[0]
    assert "the class Linear" in told[1]


class _LoaderAround:  # as timm's PrefetchLoader
    def __init__(self, loader):
        self.loader = loader

    def __iter__(self):
        return iter(self.loader)


class _OptimizerAround:
    def __init__(self, optimizer):
        self.step, self.zero_grad = optimizer.step, optimizer.zero_grad


def test_what_wraps_a_loader_or_an_optimizer_is_passed_through_with_a_warning(caplog):
    accelerator, model = Accelerator(cpu=True), nn.Linear(1, 1)
    loader = _LoaderAround(DataLoader(torch.arange(4.0)))
    optimizer = _OptimizerAround(torch.optim.SGD(model.parameters(), lr=0.1))
    with caplog.at_level(logging.WARNING):
        accelerator.prepare(model)
        accelerator.prepare({"x": 1}, range(3), torch.ones(2), "text", None)
        assert not caplog.records
        assert accelerator.prepare(loader, optimizer) == (loader, optimizer)
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2
    assert "_LoaderAround" in told[0]
    assert "_OptimizerAround" in told[1]


def test_arguments_of_another_type_end_in_a_sentence():
    accelerator = Accelerator(cpu=True)
    for loss in (1.0, None, torch.nn.Linear(1, 1)):
        with pytest.raises(TypeError, match=r"backward\(.*\): expected the loss as a tensor"):
            accelerator.backward(loss)
    with pytest.raises(TypeError, match=r"clip_grad_norm_\(3, …\): expected one or more tensors"):
        accelerator.clip_grad_norm_(3, 1.0)
    with pytest.raises(TypeError, match=r"clip_grad_value_\(3, …\): expected one or more tensors"):
        accelerator.clip_grad_value_(3, 1.0)
    with pytest.raises(TypeError, match=r"autocast\(True\): expected AutocastKwargs"):
        accelerator.autocast(True)


def test_what_is_assigned_to_states_and_what_is_prepared_has_an_effect():
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(torch.arange(4.0), batch_size=2))
    loader.batch_sampler.sampler = [3, 2, 1, 0]
    assert [batch.tolist() for batch in loader] == [[3.0, 2.0], [1.0, 0.0]]
    state = accelerator.gradient_state
    state.dataloader_references = [None, loader]
    assert state.active_dataloader is loader
    state.dataloader_references = [None]
    assert not state.in_dataloader
    assert state._dataloader_references_ref == [None]
    state._is_xla_gradients_synced = True
    assert state.is_xla_gradients_synced
    state.is_xla_gradients_synced = False
    model, other = nn.Linear(2, 1), nn.Linear(2, 1)
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    optimizer._switch_parameters({model.weight: other.weight})
    assert optimizer.param_groups[0]["params"] == [other.weight, model.bias]
    accelerator.state._check_initialized("no", cpu=True)
    with pytest.raises(ValueError, match="bf16"):
        accelerator.state._check_initialized("bf16")
