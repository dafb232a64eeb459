"""What DeepSpeed's engine does besides plain steps: loss scaling, experts, its own files, norms."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import MixtralConfig, MixtralForCausalLM

from accel_plugins.deepspeed.library import ds_module
from accel_plugins.deepspeed.plugin import DeepSpeedPlugin
from accel_state.accelerator_state import AcceleratorState
from accel_state.errors import SettingsError
from accel_train import Accelerator
from harness import distributed
from harness.engines import deepspeed_process

WORLD, WIDTH = 2, 8
DIVIDE_ALL = {"stage": 3, "stage3_param_persistence_threshold": 0}


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, 1))


def rows(rank):
    return torch.randn(3, 4, WIDTH, generator=torch.Generator().manual_seed(rank))


@contextmanager
def prepared(plugin, model, **arguments):
    """An accelerator with a model, SGD and a schedule."""
    AcceleratorState._reset_state()
    accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(**plugin), **arguments)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    yield accelerator, *accelerator.prepare(model, optimizer, schedule)
    accelerator.free_memory()


@contextmanager
def with_float16():
    """DeepSpeed trains in float16 only on CPUs that have instructions for it; torch computes on all."""
    with pytest.MonkeyPatch.context() as patch:
        device = ds_module("accelerator").get_accelerator()
        patch.setattr(type(device), "is_fp16_supported", lambda self: True)
        yield


def whole(accelerator, model):
    weights = accelerator._parts.strategy.states.full_state_dict(model, exact=True)
    return {name: value.clone() for name, value in weights.items()}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@distributed(world_size=WORLD)
def test_an_infinite_gradient_on_one_rank_skips_the_step_on_all(stage):
    config = {
        "fp16": {"enabled": True, "initial_scale_power": 4, "hysteresis": 1, "loss_scale_window": 100},
        "zero_optimization": {"stage": stage},
    }
    with (
        deepspeed_process(),
        with_float16(),
        prepared({"hf_ds_config": config}, make_model(), mixed_precision="fp16") as run,
    ):
        accelerator, model, optimizer, schedule = run
        before = whole(accelerator, model)
        factor = float("inf") if dist.get_rank() == 1 else 1.0
        accelerator.backward(model(rows(0)[0]).mean() * factor)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        assert optimizer.step_was_skipped
        assert accelerator.optimizer_step_was_skipped
        assert schedule.get_last_lr() == [0.1]
        inner = model.optimizer
        assert getattr(inner, "loss_scale_config", inner).cur_scale == 8.0
        for name, value in whole(accelerator, model).items():
            assert torch.equal(value, before[name])
        right = make_model().half().float()
        optimizer_alone = torch.optim.SGD(right.parameters(), lr=0.1)
        shard, shards = rows(dist.get_rank())[1], [rows(rank)[1] for rank in range(WORLD)]
        accelerator.backward(model(shard).square().mean())
        norm = accelerator.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        schedule.step()
        assert not optimizer.step_was_skipped
        assert schedule.get_last_lr() == [pytest.approx(0.1 / 3)]
        (right(torch.cat(shards)).square().mean()).backward()
        wanted = nn.utils.clip_grad_norm_(right.parameters(), 0.05)
        optimizer_alone.step()
        if norm is not None:
            assert norm.item() == pytest.approx(wanted.item(), rel=5e-3)
        for name, value in whole(accelerator, model).items():
            torch.testing.assert_close(value, right.state_dict()[name], rtol=0, atol=5e-5)


@distributed(world_size=WORLD)
def test_a_precision_that_the_device_does_not_have_is_refused_on_every_rank():
    with deepspeed_process(), pytest.MonkeyPatch.context() as patch:
        device = ds_module("accelerator").get_accelerator()
        patch.setattr(type(device), "is_fp16_supported", lambda self: False)
        with (
            pytest.raises(ValueError, match="fp16 is not supported on your device"),
            prepared({"zero_stage": 2}, make_model(), mixed_precision="fp16"),
        ):
            pass


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


class Experts(nn.Module):
    """Uses only the experts to which a row goes, so that ranks use different ones."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList([Expert() for _ in range(4)])

    def forward(self, x):
        weights, chosen = self.router(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            is_chosen = chosen == index
            if is_chosen.any():
                out[is_chosen] = expert(x[is_chosen]) * weights[is_chosen, None]
        return x + out


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList([Experts() for _ in range(2)])

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x


def own_mixture():
    torch.manual_seed(3)
    return Mixture(), "Experts", lambda model, batch: model(batch).square().mean()


def mixtral():
    torch.manual_seed(3)
    config = MixtralConfig(
        hidden_size=WIDTH,
        intermediate_size=12,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=4,
        num_experts_per_tok=1,
        vocab_size=11,
    )

    def loss_of(model, batch):
        tokens = (batch * 100).long().remainder(11)
        return model(input_ids=tokens, labels=tokens, use_cache=False).loss

    return MixtralForCausalLM(config), "MixtralSparseMoeBlock", loss_of


@pytest.mark.parametrize("make", [own_mixture, mixtral])
@distributed(world_size=WORLD)
def test_experts_are_gathered_together_whichever_are_used(make):
    with deepspeed_process():
        model, name, loss_of = make()
        right, _, _ = make()
        alone = torch.optim.SGD(right.parameters(), lr=0.1)
        plugin = {"hf_ds_config": {"zero_optimization": DIVIDE_ALL}, "transformer_moe_cls_names": name}
        with prepared(plugin, model) as (accelerator, engine, optimizer, _):
            leaves = [module for module in engine.module.modules() if getattr(module, "_z3_leaf", False)]
            assert {type(module).__name__ for module in leaves} == {name}
            for step in range(3):
                accelerator.backward(loss_of(engine, rows(dist.get_rank())[step]))
                optimizer.step()
                optimizer.zero_grad()
                for rank in range(WORLD):
                    (loss_of(right, rows(rank)[step]) / WORLD).backward()
                alone.step()
                alone.zero_grad()
            for key, value in whole(accelerator, engine).items():
                torch.testing.assert_close(value, right.state_dict()[key], rtol=0, atol=1e-6)


@pytest.mark.parametrize("asked", [True, False])
@distributed(world_size=WORLD)
def test_the_engines_own_file_has_full_weights_if_that_is_asked_for(asked, tmp_path):
    plugin = {"hf_ds_config": {"zero_optimization": DIVIDE_ALL}, "zero3_save_16bit_model": asked}
    with deepspeed_process(), prepared(plugin, make_model()) as (_, engine, *_rest):
        written = engine.save_16bit_model(tmp_path, "weights.bin")
        dist.barrier()
        assert written is asked
        if asked:
            weights = torch.load(tmp_path / "weights.bin")
            assert all(torch.equal(value, weights[name]) for name, value in make_model().state_dict().items())
        else:
            assert not (tmp_path / "weights.bin").exists()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@distributed(world_size=WORLD)
def test_the_engine_tells_the_norm_of_the_gradients_that_its_configuration_clips(stage):
    plugin = {"zero_stage": stage, "gradient_clipping": 0.05}
    with deepspeed_process(), prepared(plugin, make_model()) as (accelerator, engine, optimizer, _):
        right = make_model()
        alone = torch.optim.SGD(right.parameters(), lr=0.1)
        wrapper = accelerator._parts.strategy.wrapper
        for step in range(2):
            accelerator.backward(engine(rows(dist.get_rank())[step]).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            alone.zero_grad()
            right(torch.cat([rows(rank)[step] for rank in range(WORLD)])).square().mean().backward()
            norm = nn.utils.clip_grad_norm_(right.parameters(), 0.05)
            alone.step()
            assert wrapper.get_global_grad_norm() == pytest.approx(norm.item(), rel=1e-5)
        for name, value in whole(accelerator, engine).items():
            torch.testing.assert_close(value, right.state_dict()[name], rtol=0, atol=1e-6)


@distributed(world_size=WORLD)
def test_plugins_beside_each_other_are_refused_on_every_rank():
    from accel_plugins.fsdp.plugin import FullyShardedDataParallelPlugin
    from accel_plugins.parallelism.config import ParallelismConfig, TorchTensorParallelPlugin

    with deepspeed_process():
        for more, story in (
            (
                {"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=2)},
                "fsdp_plugin=.*DeepSpeedPlugin",
            ),
            ({"torch_tp_plugin": TorchTensorParallelPlugin(tp_size=2)}, "torch_tp_plugin=.*DeepSpeedPlugin"),
            (
                {"parallelism_config": ParallelismConfig(tp_size=2)},
                r"tp_size=2\) cannot be combined with a DeepSpeedPlugin",
            ),
            (
                {"parallelism_config": ParallelismConfig(dp_shard_size=3)},
                r"makes 3 processes, but the world size is 2",
            ),
        ):
            AcceleratorState._reset_state()
            with pytest.raises(SettingsError, match=story):
                Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(zero_stage=2), **more)
