"""A checkpoint of Megatron goes on under other sizes and strategies, and theirs under Megatron."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from accel_plugins import sharding as dcp
from accel_plugins.fsdp.plugin import FullyShardedDataParallelPlugin
from accel_plugins.kwargs import DataLoaderConfiguration, GradScalerKwargs
from accel_plugins.megatron.library import core
from accel_plugins.megatron.plugin import MegatronLMPlugin
from accel_plugins.megatron.state import MegatronStates
from accel_state.accelerator_state import AcceleratorState, GradientState
from accel_train import Accelerator
from harness import distributed
from harness.cuda_names import cuda_answered_by_cpu

TOKENS, LENGTH, SAMPLES, STEPS = 32, 8, 6, 3

SIZES = {
    "tp2pp2": {"tp_degree": 2, "pp_degree": 2, "num_micro_batches": 2},
    "tp2": {"tp_degree": 2},
    "pp2": {"pp_degree": 2, "num_micro_batches": 3},
    "dp2": {"use_distributed_optimizer": True},
    "cp2dp2": {"context_parallel_size": 2, "use_distributed_optimizer": True},
}


def make_gpt2(dropout=0.0):
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 4, "vocab_size": TOKENS, "n_positions": 16}
    return GPT2LMHeadModel(GPT2Config(**sizes, attn_pdrop=dropout, embd_pdrop=dropout, resid_pdrop=dropout))


def make_llama():
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=TOKENS,
        )
    )


MODELS = {"gpt2": make_gpt2, "gpt2 with dropout": lambda: make_gpt2(0.3), "llama": make_llama}


def build(name, strategy, **options):
    """An accelerator, a model, an optimizer with two groups and a schedule."""
    AcceleratorState._reset_state()
    GradientState._reset_state()
    if strategy in SIZES:
        options["megatron_lm_plugin"] = MegatronLMPlugin(**SIZES[strategy], gradient_clipping=0.0)
    elif strategy == "fsdp2":
        options["fsdp_plugin"] = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="transformer_based_wrap", state_dict_type="FULL_STATE_DICT"
        )
    accelerator = Accelerator(
        cpu=True, dataloader_config=DataLoaderConfiguration(split_batches=True), **options
    )
    torch.manual_seed(0)
    model = MODELS[name]()
    groups = [
        {"params": [parameter for parameter in model.parameters() if parameter.ndim > 1]},
        {
            "params": [parameter for parameter in model.parameters() if parameter.ndim == 1],
            "weight_decay": 0.0,
        },
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.01, eps=1e-4)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    model, optimizer = accelerator.prepare(model, optimizer)
    return accelerator, model, optimizer, schedule


def train(run, first, steps=STEPS):
    """Train some steps, of which every rank takes its samples; return the losses."""
    accelerator, model, optimizer, schedule = run
    tokens = torch.randint(0, TOKENS, (100, SAMPLES, LENGTH), generator=torch.Generator().manual_seed(1))
    sharding = accelerator._parts.strategy.sharding
    each = SAMPLES // sharding.num_shards
    losses = []
    rows = slice(sharding.shard_index * each, (sharding.shard_index + 1) * each)
    for step in range(first, first + steps):
        batch = {"input_ids": tokens[step, rows], "labels": tokens[step, rows]}
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def one_leg(name, stop, folder, leg):
    strategy = stop.partition("@")[0]
    with cuda_answered_by_cpu() if strategy in SIZES else nullcontext():
        run = build(name, strategy)
        accelerator, _, _, schedule = run
        accelerator.register_for_checkpointing(schedule)
        if leg:
            accelerator.load_state(folder / f"leg{leg - 1}")
        train(run, leg * STEPS)
        accelerator.save_state(folder / f"leg{leg}")
        accelerator.wait_for_everyone()
        accelerator.free_memory()


@distributed(world_size=2)
def leg_on_two(name, stop, folder, leg):
    one_leg(name, stop, folder, leg)


@distributed(world_size=3)
def leg_on_three(name, stop, folder, leg):
    one_leg(name, stop, folder, leg)


@distributed(world_size=4)
def leg_on_four(name, stop, folder, leg):
    one_leg(name, stop, folder, leg)


def leg_on_one(name, stop, folder, leg):
    try:
        one_leg(name, stop, folder, leg)
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


LEGS = {"1": leg_on_one, "2": leg_on_two, "3": leg_on_three, "4": leg_on_four}


@pytest.mark.parametrize(
    ("name", "journey"),
    [
        ("gpt2", ("tp2pp2@4", "fsdp2@3", "single@1")),
        ("llama", ("fsdp2@2", "tp2pp2@4", "cp2dp2@4", "tp2@2", "single@1")),
        pytest.param("gpt2", ("single@1", "dp2@2", "pp2@2", "single@1"), marks=pytest.mark.thorough),
    ],
    ids=str,
)
def test_a_run_goes_on_under_another_strategy_and_other_sizes(name, journey, tmp_path):
    for leg, stop in enumerate(journey):
        LEGS[stop[-1]](name=name, stop=stop, folder=tmp_path, leg=leg)
    last = tmp_path / f"leg{len(journey) - 1}"
    weights, optimizer = load_file(last / "model.safetensors"), torch.load(last / "optimizer.bin")
    try:
        undisturbed = build(name, "single")
        train(undisturbed, 0, STEPS * len(journey))
        right, state = undisturbed[1].state_dict(), undisturbed[2].state_dict()
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
    for key, value in right.items():
        if key in weights:
            torch.testing.assert_close(weights[key], value, rtol=0, atol=1e-6, msg=key)
    assert optimizer["state"].keys() == state["state"].keys()
    for number, entry in state["state"].items():
        torch.testing.assert_close(optimizer["state"][number], entry, rtol=0, atol=1e-6, msg=str(number))


@distributed(world_size=2)
def test_master_weights_are_saved_with_all_their_digits(tmp_path):
    with cuda_answered_by_cpu():
        run = build("llama", "dp2", mixed_precision="bf16")
        run[0].register_for_checkpointing(run[3])
        train(run, 0)
        run[0].save_state(tmp_path / "here")
        train(run, STEPS)
        expected = run[0].get_state_dict(run[1])
        run[0].free_memory()
        again = build("llama", "dp2", mixed_precision="bf16")
        again[0].register_for_checkpointing(again[3])
        again[0].load_state(tmp_path / "here")
        train(again, STEPS)
        weights = again[0].get_state_dict(again[1])
        again[0].free_memory()
    assert {value.dtype for value in expected.values()} <= {torch.float32}
    torch.testing.assert_close(weights, expected, rtol=0, atol=0)


@distributed(world_size=2)
def test_the_loss_scale_and_the_dropout_of_tensor_parallelism_go_on(tmp_path):
    def begin(strategy="tp2", **options):
        scaling = GradScalerKwargs(init_scale=2.0**10, growth_factor=4.0, growth_interval=2)
        options = {"mixed_precision": "fp16", "kwargs_handlers": [scaling]} | options
        run = build("gpt2 with dropout", strategy, **options)
        run[0].register_for_checkpointing(run[3])
        return run

    def scale_of(run):
        return run[1].optimizer.get_loss_scale().item()

    def end(run):
        run[0].free_memory()

    with cuda_answered_by_cpu():
        run = begin()
        assert scale_of(run) == 2.0**10
        train(run, 0)
        assert not run[2].step_was_skipped
        assert scale_of(run) == 2.0**12
        run[0].save_state(tmp_path / "here")
        run[0].wait_for_everyone()
        expected, scale = train(run, STEPS), scale_of(run)
        end(run)
        again = begin()
        again[0].load_state(tmp_path / "here")
        assert scale_of(again) == 2.0**12
        assert train(again, STEPS) == expected
        assert scale_of(again) == scale == 2.0**16
        end(again)
        plain = torch.amp.GradScaler("cpu", init_scale=1.0)
        plain.load_state_dict(torch.load(tmp_path / "here" / "scaler.pt"))
        assert plain.get_scale() == 2.0**12
        constant = begin(kwargs_handlers=[GradScalerKwargs(enabled=False)])
        assert scale_of(constant) == 1.0
        end(constant)

        other = begin("dp2", mixed_precision="no")  # without a loss scale, and of other groups
        other[0].save_state(tmp_path / "other")
        other[0].wait_for_everyone()
        end(other)
        last = begin()
        last[0].load_state(tmp_path / "other")
        assert scale_of(last) == 2.0**10
        tracker = core("tensor_parallel").get_cuda_rng_tracker().get_states()["model-parallel-rng"]
        shared, own = (last[0].gather(state.int()[None]) for state in (torch.get_rng_state(), tracker))
        assert torch.equal(shared[0], shared[1])  # of what both ranks compute
        assert not torch.equal(own[0], own[1])
        end(last)


def bytes_of_tensors():
    """Return how many bytes the storages of tensors have that Python knows."""
    storages = [value.untyped_storage() for value in gc.get_objects() if isinstance(value, torch.Tensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@distributed(world_size=2)
def test_states_are_gathered_one_parameter_at_a_time():
    with cuda_answered_by_cpu():
        run = build("llama", "dp2")
        train(run, 0, 1)
        engine, held = run[1], []
        sizes = [4 * parameter.numel() for parameter in engine.parameters()]
        gc.collect()
        before = bytes_of_tensors()
        states = MegatronStates(run[0].device)
        with patch.object(states, "_shard", lambda _: held.append(bytes_of_tensors() - before)):
            states.model_tensors(engine)
            states.optimizer_tensors(run[2].optimizer, [engine])
        run[0].free_memory()
    assert max(held) <= 4 * max(sizes) < sum(sizes)


@distributed(world_size=2)
def test_the_state_of_the_optimizer_can_be_left_out(tmp_path):
    with cuda_answered_by_cpu():
        run = build("llama", "dp2")
        train(run, 0)
        run[0].save_state(tmp_path / "with")
        run[0].free_memory()
        with patch.dict(SIZES["dp2"], no_save_optim=True):
            run = build("llama", "dp2")
            train(run, 0)
            run[0].save_state(tmp_path / "without")
            run[0].free_memory()
    index = dcp.folder.read_index(tmp_path / "with" / "optimizer_0")
    assert "state" in {entry.path[1] for entry in dcp.folder.entries(index)}
    index = dcp.folder.read_index(tmp_path / "without" / "optimizer_0")
    assert {entry.path[1] for entry in dcp.folder.entries(index)} == {"param_groups"}


@distributed(world_size=2)
def test_the_state_of_the_optimizer_can_be_left_where_it_is_saved(tmp_path):
    with cuda_answered_by_cpu():
        run = build("llama", "dp2")
        train(run, 0)
        run[0].save_state(tmp_path / "here")
        expected = run[0].get_state_dict(run[1])
        run[0].free_memory()
        with patch.dict(SIZES["dp2"], no_load_optim=True):
            run = build("llama", "dp2")
            run[0].load_state(tmp_path / "here")
            weights = run[0].get_state_dict(run[1])
            rates = [group["lr"] for group in run[2].param_groups]
            steps = [
                int(entry["step"])
                for part in run[1].optimizer.chained_optimizers
                for entry in part.optimizer.state.values()
                if "step" in entry
            ]
            run[0].free_memory()
    torch.testing.assert_close(weights, expected, rtol=0, atol=0)
    assert rates == [0.01, 0.01]
    assert not any(steps)
