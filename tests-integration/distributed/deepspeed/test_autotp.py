"""DeepSpeed's tensor parallelism (AutoTP): equal to one process, gathered, saved and resumed."""

from __future__ import annotations

import copy
from itertools import islice

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM

from accel_plugins.deepspeed.plugin import DeepSpeedPlugin
from accel_plugins.parallelism.config import ParallelismConfig
from accel_state.accelerator_state import AcceleratorState
from accel_state.errors import SettingsError, UnsupportedError
from accel_train import Accelerator
from harness import distributed
from harness.engines import deepspeed_process

SAMPLES = 24
BATCH = 2


def make_model():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "vocab_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, mlp_bias=True, tie_word_embeddings=False))


def make_data():
    return torch.randint(0, 64, (SAMPLES, 8), generator=torch.Generator().manual_seed(1))


def plainly(batch, clip):
    """Train on all batches of one process; return the weights, the state of the optimizer, and the norms."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    norms = []
    for tokens in make_data().split(batch):
        model(input_ids=tokens, labels=tokens).loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), clip).item())
        optimizer.step()
        optimizer.zero_grad()
    state = optimizer.state_dict()["state"]
    names = [name for name, _ in model.named_parameters()]
    return model.state_dict(), {name: state[index] for index, name in enumerate(names)}, norms


def configured(stage, size=2, **more):
    zero = {"zero_optimization": {"stage": stage}, "train_micro_batch_size_per_gpu": "auto"}
    return DeepSpeedPlugin(hf_ds_config={**zero, "tensor_parallel": {"autotp_size": size}, **more})


def prepare_all(accelerator):
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return accelerator.prepare(model, optimizer, DataLoader(TensorDataset(make_data()), batch_size=BATCH))


def train(accelerator, model, optimizer, batches, clip=1.0):
    norms, seen = [], []
    for (tokens,) in batches:
        accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
        norms.append(accelerator.clip_grad_norm_(model.parameters(), clip).item())
        optimizer.step()
        optimizer.zero_grad()
        seen.append(accelerator.gather_for_metrics(tokens))
    return norms, torch.cat(seen)


def check_equality(stage, shards, folder):
    AcceleratorState._reset_state()
    right, moments, right_norms = plainly(BATCH * shards, clip=1.0)
    accelerator = Accelerator(cpu=True, deepspeed_plugin=configured(stage))
    model, optimizer, loader = prepare_all(accelerator)
    norms, seen = train(accelerator, model, optimizer, loader)
    assert norms == pytest.approx(right_norms, abs=1e-5)
    assert torch.equal(seen, make_data()), "every sample is gathered once"
    states = accelerator._parts.strategy.states
    for state in (states.full_state_dict(model, exact=True), dict(accelerator.named_full_parameters(model))):
        assert state.keys() == right.keys()
        for name, value in right.items():
            torch.testing.assert_close(state[name], value, rtol=0, atol=1e-5)
    if accelerator.is_main_process:  # without a collective
        told = {spec.name: spec.shape for spec in accelerator.weight_source(model).metadata()}
        assert told == {name: tuple(value.shape) for name, value in right.items()}
    gathered = states.optimizer_tensors(optimizer, [model])["state"]
    for name, entry in moments.items():
        torch.testing.assert_close(gathered[name]["exp_avg"], entry["exp_avg"], rtol=0, atol=1e-5)

    # A run that goes on equals one that was not interrupted, from the engine's folder and from full states.
    accelerator.save_state(folder / "state")
    full = copy.deepcopy(states.full_state_dict(model, exact=True))
    tensors = copy.deepcopy(states.optimizer_tensors(optimizer, [model]))
    wanted, _ = train(accelerator, model, optimizer, islice(loader, 3))
    accelerator.load_state(folder / "state")
    assert train(accelerator, model, optimizer, islice(loader, 3))[0] == wanted
    states.load_full_state_dict(model, full)
    states.load_optimizer(optimizer, [model], tensors)
    assert train(accelerator, model, optimizer, islice(loader, 3))[0] == pytest.approx(wanted, abs=1e-6)
    accelerator.free_memory()


@pytest.mark.parametrize("stage", [1, 2])
@distributed(world_size=2)
def test_two_ranks_that_share_layers_end_like_one_process(stage, tmp_path):
    with deepspeed_process():
        check_equality(stage, 1, tmp_path)


@pytest.mark.thorough
@distributed(world_size=4)
def test_two_pairs_of_such_ranks_do(tmp_path):
    with deepspeed_process():
        check_equality(1, 2, tmp_path)


@distributed(world_size=2)
def test_what_a_configuration_cannot_have_beside_it_is_refused_by_name():
    with deepspeed_process():
        for plugin, axes, error, words in (
            (configured(3), None, SettingsError, r"autotp_size=2 .* stage 3"),
            (configured(1, size=3), None, SettingsError, r"autotp_size=3 .* 2 processes"),
            (configured(1), ParallelismConfig(sp_size=2), SettingsError, "autotp_size=2 .* no sp_size"),
            (configured(1, 1, expert_parallel={"enabled": True}), None, UnsupportedError, "expert_parallel"),
        ):
            AcceleratorState._reset_state()
            with pytest.raises(error, match=words):
                Accelerator(cpu=True, deepspeed_plugin=plugin, parallelism_config=axes)
