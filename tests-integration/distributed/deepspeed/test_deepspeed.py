"""Training with DeepSpeed through `Accelerator` on two ranks ends as in one process."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_plugins.deepspeed.config import DummyOptim, DummyScheduler
from accel_plugins.deepspeed.engine import DeepSpeedOptimizerWrapper, DeepSpeedSchedulerWrapper
from accel_plugins.deepspeed.plugin import DeepSpeedPlugin, get_active_deepspeed_plugin
from accel_plugins.kwargs import GradientAccumulationPlugin
from accel_state.accelerator_state import AcceleratorState
from accel_state.errors import SettingsError, UnsupportedError
from accel_train import Accelerator
from harness import distributed
from harness.engines import deepspeed_process

WORLD = 2
BATCH = 4
STAGES = (0, 1, 2, 3)


def make_data(samples=96):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(samples, 5, generator=generator), torch.randn(samples, 1, generator=generator)


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 1))


def make_loader():
    return DataLoader(TensorDataset(*make_data()), batch_size=BATCH)


def decay(step):
    return 1 / (1 + 0.1 * step)


def plainly(accumulation=1, clip=None, rate=None):
    """One process, plain PyTorch, global batches; `rate` of every step, else a schedule by processes."""
    (inputs, targets), model, norms = make_data(), make_model(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, decay)
    batches = [*zip(inputs.split(BATCH * WORLD), targets.split(BATCH * WORLD), strict=True)]
    for step, first in enumerate(range(0, len(batches), accumulation)):
        if rate is not None:
            optimizer.param_groups[0]["lr"] = rate(step)
        for inputs, targets in batches[first : first + accumulation]:
            (nn.functional.mse_loss(model(inputs), targets) / accumulation).backward()
        if clip is not None:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), clip).item())
        optimizer.step()
        optimizer.zero_grad()
        if rate is None:
            for _ in range(WORLD):
                scheduler.step()
    return model.state_dict(), norms


@contextmanager
def accelerator_of(plugin, **arguments):
    AcceleratorState._reset_state()
    accelerator = Accelerator(cpu=True, deepspeed_plugin=plugin, **arguments)
    yield accelerator
    accelerator.free_memory()


def prepare_all(accelerator):
    """Prepare the model, an optimizer and a scheduler of torch, and the loader of these tests."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, decay)
    return accelerator.prepare(model, optimizer, scheduler, make_loader())


def train(accelerator, model, optimizer, scheduler, loader, clip=None, *, clear_first=False):
    norms = []
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            if clear_first:
                optimizer.zero_grad()
            accelerator.backward(nn.functional.mse_loss(model(inputs), targets))
            if clip is not None and accelerator.sync_gradients:
                norms.append(accelerator.clip_grad_norm_(model.parameters(), clip).item())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return norms


def assert_equal(accelerator, model, right, tolerance=1e-6):
    state = accelerator._parts.strategy.states.full_state_dict(model, exact=True)
    assert state.keys() == right.keys()
    for name, value in right.items():
        torch.testing.assert_close(state[name], value, rtol=0, atol=tolerance)


@pytest.mark.parametrize("stage", STAGES)
@distributed(world_size=WORLD)
def test_two_ranks_end_like_one_process(stage):
    with deepspeed_process():
        for accumulation in (1, 3):
            for clip in (None, 0.1):
                right, norms = plainly(accumulation, clip)
                plugin = DeepSpeedPlugin(zero_stage=stage)
                with accelerator_of(plugin, gradient_accumulation_steps=accumulation) as accelerator:
                    prepared = prepare_all(accelerator)
                    actual = train(accelerator, *prepared, clip=clip, clear_first=clip is None)
                    assert actual == pytest.approx(norms, abs=1e-5)
                    assert_equal(accelerator, prepared[0], right)
                    assert accelerator.distributed_type == "DEEPSPEED"


@pytest.mark.parametrize("stage", [0, 2, 3])
@distributed(world_size=WORLD)
def test_zero_grad_before_the_step_changes_nothing(stage):
    """As in Accelerate, where `backward` has stepped by then."""
    with deepspeed_process():
        right, _ = plainly()
        with accelerator_of(DeepSpeedPlugin(zero_stage=stage)) as accelerator:
            model, optimizer, scheduler, loader = prepare_all(accelerator)
            for inputs, targets in loader:
                accelerator.backward(nn.functional.mse_loss(model(inputs), targets))
                optimizer.zero_grad()
                optimizer.step()
                scheduler.step()
            assert_equal(accelerator, model, right)


@pytest.mark.parametrize(
    ("stage", "offload"),
    [
        (1, {"offload_optimizer": {"device": "cpu"}}),
        (2, {"offload_optimizer": {"device": "cpu"}}),
        (3, {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}),
    ],
)
@distributed(world_size=WORLD)
def test_offloading_changes_nothing(stage, offload):
    config = {"zero_optimization": {"stage": stage, **offload}, "zero_force_ds_cpu_optimizer": False}
    with deepspeed_process():
        right, norms = plainly(3, 0.1)
        plugin = DeepSpeedPlugin(hf_ds_config=config)
        with accelerator_of(plugin, gradient_accumulation_steps=3) as accelerator:
            prepared = prepare_all(accelerator)
            assert train(accelerator, *prepared, clip=0.1) == pytest.approx(norms, abs=1e-5)
            assert_equal(accelerator, prepared[0], right)


@distributed(world_size=WORLD)
def test_the_optimizer_and_the_schedule_of_the_configuration_train():
    names = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps")
    config = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": 3,
        "gradient_clipping": 0.1,
        "zero_optimization": {"stage": 2},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto", "torch_adam": True}},
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {**dict.fromkeys(names, "auto"), "warmup_type": "linear"},
        },
    }
    with deepspeed_process(), accelerator_of(DeepSpeedPlugin(hf_ds_config=config)) as accelerator:
        assert accelerator.gradient_accumulation_steps == 3
        model = make_model()
        optimizer = DummyOptim(model.parameters(), lr=0.05, weight_decay=0.01)
        scheduler = DummyScheduler(optimizer, total_num_steps=12, warmup_num_steps=4)
        model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, make_loader())
        assert type(optimizer) is DeepSpeedOptimizerWrapper
        assert type(scheduler) is DeepSpeedSchedulerWrapper
        assert model.train_micro_batch_size_per_gpu() == BATCH
        rates = []
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                if accelerator.sync_gradients:
                    rates.append(scheduler.get_last_lr()[0])
                accelerator.backward(nn.functional.mse_loss(model(inputs), targets))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        # DeepSpeed begins with its first rate twice; warm-up of two steps, as 4 batches of two processes are.
        assert rates == pytest.approx([0.0, 0.0, 0.025, 0.05])
        right, _ = plainly(3, 0.1, rate=lambda step: rates[step])
        assert_equal(accelerator, model, right)


@distributed(world_size=WORLD)
def test_several_plugins_by_name_each_with_its_accelerator():
    plugins = {"student": DeepSpeedPlugin(zero_stage=2), "teacher": DeepSpeedPlugin(zero_stage=3)}
    with deepspeed_process():
        AcceleratorState._reset_state()
        first = Accelerator(cpu=True, deepspeed_plugins=plugins)
        assert first.deepspeed_plugin is plugins["student"]
        student = make_model()
        student, optimizer = first.prepare(student, torch.optim.AdamW(student.parameters(), lr=0.05))
        assert student.zero_optimization_stage() == 2
        first.state.select_deepspeed_plugin("teacher")
        assert get_active_deepspeed_plugin(first.state) is plugins["teacher"]
        assert (plugins["teacher"].selected, plugins["student"].selected) == (True, False)
        assert first.state.get_deepspeed_plugin("student") is plugins["student"]
        teacher = first.prepare(make_model())
        assert teacher.zero_optimization_stage() == 3
        second = Accelerator(cpu=True)
        other = make_model()
        other, other_optimizer = second.prepare(other, torch.optim.AdamW(other.parameters(), lr=0.05))
        assert other.zero_optimization_stage() == 3
        inputs = torch.ones(2, 5)
        for accelerator, model, stepping in ((first, student, optimizer), (second, other, other_optimizer)):
            with torch.no_grad():
                wanted = teacher(inputs)
            accelerator.backward(nn.functional.mse_loss(model(inputs), wanted + 1))
            stepping.step()
            stepping.zero_grad()
        for name, value in first._parts.strategy.states.full_state_dict(student).items():
            twin = second._parts.strategy.states.full_state_dict(other)[name]
            torch.testing.assert_close(value, twin, rtol=0, atol=1e-6)
        with pytest.raises(SettingsError, match="'student', 'teacher'"):
            first.state.select_deepspeed_plugin("nobody")
        for accelerator in (first, second):
            accelerator.free_memory()


@distributed(world_size=WORLD)
def test_evaluation_counts_every_sample_once_and_other_strategies_refuse_what_stands_in():
    with deepspeed_process():
        with accelerator_of(DeepSpeedPlugin(zero_stage=3)) as accelerator:
            model = make_model()
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
            loader = DataLoader(torch.arange(13.0)[:, None].expand(13, 5), batch_size=BATCH)
            model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
            model.eval()
            with torch.no_grad():
                outputs = torch.cat([accelerator.gather_for_metrics(model(batch)) for batch in loader])
            wanted = make_model()(torch.arange(13.0)[:, None].expand(13, 5))
            torch.testing.assert_close(outputs.sort(0).values, wanted.detach().sort(0).values)
            with pytest.raises(UnsupportedError, match="ITEM_COUNTS"):
                accelerator.backward(model(torch.ones(1, 5)).sum(), num_items=3)
        AcceleratorState._reset_state()
        model = make_model()
        with pytest.raises(UnsupportedError, match=r"DummyOptim.*OPTIMIZER_FROM_CONFIGURATION"):
            Accelerator(cpu=True).prepare(model, DummyOptim(model.parameters()))
        assert dist.is_initialized()


@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.thorough), 3])
@distributed(world_size=WORLD)
def test_a_model_is_compiled_inside_its_engine(stage):
    with deepspeed_process():
        right, _ = plainly(3)
        plugin = DeepSpeedPlugin(zero_stage=stage)
        with accelerator_of(plugin, gradient_accumulation_steps=3, dynamo_backend="eager") as accelerator:
            model = make_model()
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, decay)
            prepared = accelerator.prepare(model, optimizer, scheduler, make_loader())
            assert accelerator.unwrap_model(prepared[0]) is model
            assert model._compiled_call_impl is not None
            train(accelerator, *prepared)
            assert_equal(accelerator, prepared[0], right)
        torch._dynamo.reset()


@pytest.mark.thorough
@distributed(world_size=WORLD)
def test_a_model_that_was_compiled_is_trained_by_stage_3():
    with deepspeed_process():
        right, _ = plainly(3)
        with accelerator_of(DeepSpeedPlugin(zero_stage=3), gradient_accumulation_steps=3) as accelerator:
            model = make_model()
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, decay)
            graphs = []
            compiled = torch.compile(model, backend=lambda graph, _: graphs.append(graph) or graph)
            prepared = accelerator.prepare(compiled, optimizer, scheduler, make_loader())
            train(accelerator, *prepared)
            assert graphs
            assert_equal(accelerator, prepared[0], right)
        torch._dynamo.reset()


@distributed(world_size=WORLD)
def test_models_of_transformers_are_sharded_while_they_are_made():
    from transformers import BertConfig, BertModel
    from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

    config = BertConfig(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, vocab_size=16
    )
    with deepspeed_process():
        plugin = DeepSpeedPlugin(zero_stage=3)
        with accelerator_of(plugin) as accelerator:
            assert plugin.is_zero3_init_enabled()
            assert is_deepspeed_zero3_enabled()
            model = BertModel._from_config(config)
            assert model.embeddings.word_embeddings.weight.ds_shape == (16, 8)
            with plugin.zero3_init_context_manager(enable=False):
                whole = BertModel._from_config(config)
            assert whole.embeddings.word_embeddings.weight.shape == (16, 8)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
            model, optimizer = accelerator.prepare(model, optimizer)
            accelerator.backward(model(torch.ones(1, 4, dtype=torch.long)).last_hidden_state.square().mean())
            optimizer.step()
            state = accelerator.get_state_dict(model)
            assert dist.get_rank() or state["embeddings.word_embeddings.weight"].shape == (16, 8)
            plugin._unselect()


@pytest.mark.parametrize("stage", [0, 2])
@distributed(world_size=WORLD)
def test_loops_that_divide_the_loss_by_themselves_say_so_to_backward(stage):
    """As those of transformers: the Accelerator has one micro-batch, the configuration three."""
    with deepspeed_process():
        right, _ = plainly(3, None)
        config = {"gradient_accumulation_steps": 3, "zero_optimization": {"stage": stage}}
        plugin = GradientAccumulationPlugin(num_steps=1)
        with accelerator_of(
            DeepSpeedPlugin(hf_ds_config=config), gradient_accumulation_plugin=plugin
        ) as accelerator:
            assert accelerator.gradient_accumulation_steps == 3
            model, optimizer, scheduler, loader = prepare_all(accelerator)
            for inputs, targets in loader:
                with accelerator.accumulate(model):
                    loss = nn.functional.mse_loss(model(inputs), targets) / 3
                    accelerator.backward(loss, scale_wrt_gas=False)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
            assert_equal(accelerator, model, right)


@pytest.mark.parametrize("stage", [1, 3])
@distributed(world_size=WORLD)
def test_adagrad_keeps_its_groups_and_its_schedule(stage):
    """ZeRO makes a new Adagrad of the defaults, with one group that no schedule knows."""
    (inputs, targets), plain = make_data(), make_model()

    def adagrad(model, *, split):
        groups = [{"params": model[0].parameters(), "lr": 0.02}, {"params": model[2].parameters()}]
        groups = groups if split else [{"params": model.parameters(), "lr": 0.02}]
        optimizer = torch.optim.Adagrad(groups, lr=0.05)
        return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, decay)

    expected, schedule = adagrad(plain, split=stage == 3)
    for batch, target in zip(inputs.split(BATCH * WORLD), targets.split(BATCH * WORLD), strict=True):
        nn.functional.mse_loss(plain(batch), target).backward()
        expected.step()
        expected.zero_grad()
        for _ in range(WORLD):
            schedule.step()
    with deepspeed_process(), accelerator_of(DeepSpeedPlugin(zero_stage=stage)) as accelerator:
        model = make_model()
        prepared = accelerator.prepare(model, *adagrad(model, split=stage == 3), make_loader())
        train(accelerator, *prepared)
        assert_equal(accelerator, prepared[0], plain.state_dict())
