"""The strategy `deepspeed` on two ranks: the public suite, its precision, and what it keeps its hands off."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from accel_plugins.deepspeed import strategy as deepspeed
from accel_plugins.deepspeed.library import GatheredParameters
from accel_plugins.deepspeed.plugin import DeepSpeedPlugin
from accel_plugins.precision import build_precision
from accel_plugins.strategy import Bundle, Feature
from accel_plugins.testing import StrategySubject, check_strategy
from accel_state.errors import SettingsError, UnsupportedError
from accel_state.partial_state import PartialState
from accel_train import Accelerator
from harness import distributed
from harness.engines import deepspeed_process

CPU = torch.device("cpu")
STAGES = (0, 1, 2, 3)


def make_strategy(precision="no", **fields):
    runtime = PartialState(cpu=True).runtime
    plugin = DeepSpeedPlugin(**fields)
    return deepspeed.DeepSpeedStrategy(
        None, runtime, build_precision(precision, CPU), {DeepSpeedPlugin: plugin}
    )


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def wrap(strategy, model, optimizer):
    bundle = Bundle(models=[model], optimizers=[optimizer])
    strategy.check(bundle)
    return strategy.wrap(strategy.precision.convert(bundle))


def whole(strategy, engine):
    return {name: value.clone() for name, value in strategy.states.full_state_dict(engine).items()}


@pytest.mark.parametrize("stage", STAGES)
@distributed(world_size=2)
def test_two_ranks_conform(stage, tmp_path):
    subject = StrategySubject(
        make=lambda: make_strategy(zero_stage=stage),
        runtime=PartialState(cpu=True).runtime,
        directory=tmp_path,
        tolerance=1e-6,
        dtype=torch.float32,
        norm_types=(2.0,) if stage else (2.0, 1.0, float("inf")),
    )
    with deepspeed_process():
        check_strategy(subject)


@pytest.mark.parametrize("stage", STAGES)
@distributed(world_size=2)
def test_gradients_are_kept_until_the_step(stage):
    """Accelerate has stepped within `backward` by then, and ignores `zero_grad`."""
    with deepspeed_process():
        strategy = make_strategy(zero_stage=stage)
        model = make_model()
        bundle = wrap(strategy, model, torch.optim.SGD(model.parameters(), lr=0.1))
        engine, optimizer = bundle.models[0], bundle.optimizers[0]
        strategy.discard(optimizer)
        for sync in (False, True):
            strategy.backward(engine(torch.ones(2, 3)).mean(), accumulation=2, sync=sync)
            strategy.discard(optimizer)
        assert strategy.step(optimizer)
        right = make_model()
        right(torch.ones(2, 3)).mean().backward()
        torch.optim.SGD(right.parameters(), lr=0.1).step()
        for name, value in right.state_dict().items():
            torch.testing.assert_close(whole(strategy, engine)[name], value, rtol=0, atol=1e-6)


@pytest.mark.parametrize("stage", STAGES)
@distributed(world_size=2)
def test_two_losses_of_one_step_add_up(stage):
    with deepspeed_process():
        strategy = make_strategy(zero_stage=stage)
        model, inputs = make_model(), torch.ones(2, 3)
        bundle = wrap(strategy, model, torch.optim.SGD(model.parameters(), lr=0.1))
        engine = bundle.models[0]
        with strategy.no_sync(engine):
            strategy.backward(engine(inputs).mean(), accumulation=1, sync=True)
        strategy.backward(engine(inputs).mean(), accumulation=1, sync=True)
        if stage in {1, 2}:
            with pytest.raises(UnsupportedError, match=r"second backward\(\).*no_sync\(model\)"):
                strategy.backward(engine(inputs).mean(), accumulation=1, sync=True)
        strategy.step(bundle.optimizers[0])
        assert strategy.step(bundle.optimizers[0]), "a step without gradients does nothing"
        right = make_model()
        (2 * right(inputs).mean()).backward()
        torch.optim.SGD(right.parameters(), lr=0.1).step()
        for name, value in right.state_dict().items():
            torch.testing.assert_close(whole(strategy, engine)[name], value, rtol=0, atol=1e-6)


@pytest.mark.parametrize("stage", STAGES)
@distributed(world_size=2)
def test_models_take_and_return_float32_whatever_the_engine_computes_in(stage):
    with deepspeed_process():
        strategy = make_strategy("bf16", zero_stage=stage)
        model = make_model()
        bundle = wrap(strategy, model, torch.optim.AdamW(model.parameters(), lr=0.05))
        engine = bundle.models[0]
        assert strategy.precision.name == "bf16"
        output = engine(torch.ones(2, 3))
        assert output.dtype is torch.float32
        strategy.backward(output.mean(), accumulation=1, sync=True)
        norm = strategy.clip_grad_norm(engine.parameters(), 0.1)
        assert norm is None or norm > 0.1
        assert strategy.step(bundle.optimizers[0])
        small = whole(strategy, engine)
        exact = strategy.states.full_state_dict(engine, exact=True)
        right = make_model().bfloat16().float()
        right(torch.ones(2, 3)).mean().backward()
        torch.optim.AdamW(right.parameters(), lr=0.05).step()
        for name, value in right.state_dict().items():
            assert (small[name].dtype, exact[name].dtype) == (torch.bfloat16, torch.float32)
            torch.testing.assert_close(exact[name], value, rtol=0, atol=2e-4)
            assert torch.equal(small[name], exact[name].bfloat16())


@distributed(world_size=2)
def test_parameters_that_are_sharded_can_be_looked_at_and_changed():
    with deepspeed_process():
        strategy = make_strategy(
            hf_ds_config={"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
        )
        model = make_model()
        wrap(strategy, model, torch.optim.AdamW(model.parameters()))
        weight = model[0].weight
        assert weight.numel() == 0
        with GatheredParameters(weight, modifier_rank=0):
            assert torch.equal(weight, make_model()[0].weight)
            if dist.get_rank() == 0:
                weight.data.fill_(7.0)
        with GatheredParameters([weight]):
            assert torch.equal(weight, torch.full((4, 3), 7.0))


@distributed(world_size=2)
def test_a_model_without_an_optimizer_is_sharded_in_stage_3_only():
    with deepspeed_process():
        for stage in (2, 3):
            strategy = make_strategy(zero_stage=stage)
            bundle = Bundle(models=[make_model()])
            strategy.check(bundle)
            model = strategy.wrap(bundle).models[0]
            assert (strategy.unwrap(model) is not model) == (stage == 3)
            torch.testing.assert_close(model(torch.ones(1, 3)), make_model()(torch.ones(1, 3)))
            assert not strategy.has_engine


@distributed(world_size=2)
def test_what_cannot_be_trained_is_refused_on_every_rank_before_it_begins():
    def refused(error, story, **fields):
        model = fields.pop("model", None) or make_model()
        optimizers = fields.pop("optimizers", None)
        several = fields.pop("models", [model])
        if optimizers is None:
            optimizers = [torch.optim.SGD(model.parameters(), lr=0.1)]
        strategy = make_strategy(**fields)
        with pytest.raises(error, match=story):
            strategy.check(Bundle(models=several, optimizers=optimizers))

    with deepspeed_process():
        first, second = make_model(), make_model()
        foreign = torch.optim.SGD(second.parameters(), lr=0.1)
        refused(
            SettingsError,
            r"4 of the 4 parameter\(s\) of SGD do not belong",
            model=first,
            optimizers=[foreign],
        )
        refused(SettingsError, "together", models=[], optimizers=[foreign])
        refused(UnsupportedError, "one model with one optimizer", models=[first, second])
        zero = {"stage": 2}
        config = {"zero_optimization": zero, "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}
        refused(SettingsError, "got SGD.*optimizer=.*remove it there", hf_ds_config=config)
        refused(SettingsError, r"train_batch_size is 5 .* but 4 by", hf_ds_config={"train_batch_size": 5})
        refused(SettingsError, "'Linera'; it has Linear", zero_stage=3, transformer_moe_cls_names="Linera")


@distributed(world_size=2)
def test_steps_that_an_engine_cannot_do_are_refused():
    with deepspeed_process():
        strategy = make_strategy(zero_stage=1, gradient_clipping=1.0)
        model = make_model()
        bundle = wrap(strategy, model, torch.optim.SGD(model.parameters(), lr=0.1))
        engine, optimizer = bundle.models[0], bundle.optimizers[0]
        with strategy.no_sync(engine):
            strategy.backward(engine(torch.ones(1, 3)).sum(), accumulation=1, sync=True)
        with pytest.raises(UnsupportedError, match="no_sync"):
            strategy.step(optimizer)
        with pytest.raises(SettingsError, match=r"max_norm=0\.5.*gradient_clipping=1\.0"):
            strategy.clip_grad_norm(engine.parameters(), 0.5)
        with pytest.raises(UnsupportedError, match="norm_type=1"):
            strategy.clip_grad_norm(engine.parameters(), 1.0, 1)
        with pytest.raises(UnsupportedError, match="closure"):
            strategy.step(optimizer, lambda: 0.0)
        with pytest.raises(TypeError, match="gradient"):
            strategy.backward(engine(torch.ones(1, 3)), accumulation=1, sync=True, gradient=torch.ones(1, 1))
        with pytest.raises(UnsupportedError, match="CLIP_GRAD_VALUE"):
            strategy.require(Feature.CLIP_GRAD_VALUE, "clip_grad_value_()")
        second = make_model()
        with pytest.raises(UnsupportedError, match="after a model to train was prepared"):
            wrap(strategy, second, torch.optim.SGD(second.parameters(), lr=0.1))
        strategy.release()
        wrap(strategy, second, torch.optim.SGD(second.parameters(), lr=0.1))


@pytest.mark.parametrize("stage", [0, 2])
@distributed(world_size=2)
def test_the_optimizer_of_an_earlier_prepare_is_refused(stage):
    with deepspeed_process():
        accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(zero_stage=stage))
        loader = DataLoader(torch.ones(8, 3), batch_size=2)

        def prepare():
            model = make_model()
            return accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)

        _, earlier, _ = prepare()
        accelerator.free_memory()
        model, optimizer, _ = prepare()
        accelerator.backward(model(torch.ones(1, 3)).sum())
        with pytest.raises(UnsupportedError, match="an earlier prepare"):
            earlier.step()
        optimizer.step()
