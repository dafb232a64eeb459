"""The field's symptoms of context and sequence parallelism, and of sharding at load: rows 1, 2 and 22."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from accel_plugins.deepspeed.plugin import DeepSpeedPlugin
from accel_plugins.fsdp.plugin import FullyShardedDataParallelPlugin
from accel_plugins.parallelism.config import ParallelismConfig
from accel_state.accelerator_state import AcceleratorState
from accel_state.errors import SettingsError, UnsupportedError
from accel_train import Accelerator
from harness import distributed
from harness.engines import deepspeed_process
from harness.small_llama import SIZES, make_llama

TOKENS, LENGTH, ROWS = SIZES["vocab_size"], 16, 2


def make_model(family, config, **options):
    torch.manual_seed(0)
    return family(config(**options))


def mistral(window, longest=LENGTH):
    options = SIZES | {"sliding_window": window, "max_position_embeddings": longest}
    return make_model(MistralForCausalLM, MistralConfig, **options)


def gpt2():
    rates = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0, "attn_implementation": "sdpa"}
    return make_model(
        GPT2LMHeadModel,
        GPT2Config,
        n_embd=16,
        n_layer=2,
        n_head=2,
        vocab_size=TOKENS,
        n_positions=32,
        **rates,
    )


def gemma(window):
    kinds = ["sliding_attention", "full_attention"]
    options = SIZES | {"sliding_window": window, "max_position_embeddings": LENGTH, "head_dim": 4}
    return make_model(Gemma3ForCausalLM, Gemma3TextConfig, layer_types=kinds, **options)


def qwen3_next():
    options = SIZES | {
        "layer_types": ["full_attention", "linear_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 4,
        "linear_value_head_dim": 4,
        "head_dim": 4,
        "num_experts": 0,
    }
    return make_model(Qwen3NextForCausalLM, Qwen3NextConfig, **options)


def mamba():
    return make_model(
        MambaForCausalLM, MambaConfig, hidden_size=16, num_hidden_layers=1, vocab_size=TOKENS, state_size=4
    )


def with_context_parallelism():
    AcceleratorState._reset_state()
    return Accelerator(
        cpu=True,
        fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2),
        parallelism_config=ParallelismConfig(cp_size=2),
    )


def with_sequence_parallelism():
    AcceleratorState._reset_state()
    config = ParallelismConfig(sp_size=2)
    return Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(zero_stage=1), parallelism_config=config)


def mean_loss(logits, labels, counts):
    losses = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    return (losses * counts.flatten()).sum()


def step(accelerator, model, *, mask=None, positions=None):
    """Return the loss of both shards of the sequences, and compute the gradients of its mean."""
    tokens = torch.randint(0, TOKENS, (ROWS, LENGTH), generator=torch.Generator().manual_seed(3))
    labels = tokens.roll(-1, 1)
    counts = torch.ones(ROWS, LENGTH) if mask is None else mask.float()
    positions = torch.arange(LENGTH).repeat(ROWS, 1) if positions is None else positions
    buffers = [tokens, labels, counts, positions, *(() if mask is None else (mask,))]
    total = counts.sum()
    inputs = {"position_ids": positions} | ({} if mask is None else {"attention_mask": mask})
    with accelerator.maybe_context_parallel(buffers, [1] * len(buffers), set(buffers)):
        loss = mean_loss(model(input_ids=tokens, use_cache=False, **inputs).logits, labels, counts) / total
        accelerator.backward(loss)
    return accelerator.reduce(loss.detach())


def plain_loss(model, *, mask=None):
    tokens = torch.randint(0, TOKENS, (ROWS, LENGTH), generator=torch.Generator().manual_seed(3))
    counts = torch.ones(ROWS, LENGTH) if mask is None else mask.float()
    logits = model(input_ids=tokens, attention_mask=mask, use_cache=False).logits
    return mean_loss(logits, tokens.roll(-1, 1), counts).detach() / counts.sum()


def check_context_parallel(make, **inputs):
    accelerator = with_context_parallelism()
    model = accelerator.prepare(make())
    wanted = plain_loss(make(), **{name: value.clone() for name, value in inputs.items()})
    torch.testing.assert_close(step(accelerator, model, **inputs), wanted, rtol=0, atol=1e-5)


@distributed(world_size=2)
def test_row_1_context_parallelism_refuses_what_is_not_full_attention_by_its_layer():
    def refused(model, story):
        with pytest.raises(SettingsError, match=story):
            with_context_parallelism().prepare(model)

    refused(mistral(4), r"cp_size=2.*'model\.layers\.0\.self_attn' is 'sliding_attention' of 4 tokens")
    refused(
        mistral(LENGTH, longest=2 * LENGTH), r"sliding_attention.*max_position_embeddings=16 \(it is 32\)"
    )
    refused(gemma(4), r"'model\.layers\.0\.self_attn' is 'sliding_attention' of 4")
    refused(qwen3_next(), r"'model\.layers\.1\.linear_attn' is 'linear_attention'")
    refused(mamba(), r"'backbone\.layers\.0\.mixer' is 'linear_attention'")
    AcceleratorState._reset_state()
    ulysses = Accelerator(cpu=True, parallelism_config=ParallelismConfig(sp_size=2))
    for model, layer in (
        (qwen3_next(), r"model\.layers\.1\.linear_attn"),
        (mamba(), r"backbone\.layers\.0\.mixer"),
    ):
        with pytest.raises(SettingsError, match=rf"sp_size=2.*'{layer}' is 'linear_attention'"):
            ulysses.prepare(model)
    refused(make_llama(attn_implementation="eager"), r"'eager'.*attn_implementation='sdpa'")


@distributed(world_size=2)
def test_row_1_a_window_as_long_as_the_sequence_is_full_attention():
    check_context_parallel(lambda: mistral(LENGTH))
    check_context_parallel(lambda: gemma(LENGTH))


@distributed(world_size=2)
def test_row_1_a_sequence_longer_than_what_a_model_said_is_compared_with_its_window():
    accelerator = with_context_parallelism()
    model = accelerator.prepare(mistral(LENGTH // 2, longest=LENGTH // 2))
    with pytest.raises(UnsupportedError, match="window of 8 tokens, but sequences are of 16"):
        step(accelerator, model)


@pytest.mark.parametrize("make", [make_llama, gpt2])
@distributed(world_size=2)
def test_row_1_padding_after_tokens_is_ignored_and_other_masks_are_refused(make):
    ones = torch.ones(ROWS, LENGTH, dtype=torch.long)
    check_context_parallel(make, mask=ones.clone())
    padded = ones.clone()
    padded[0, 10:] = 0
    check_context_parallel(make, mask=padded)

    def refused(story, error=UnsupportedError, **inputs):
        accelerator = with_context_parallelism()
        model = accelerator.prepare(make())
        with pytest.raises(error, match=story):
            step(accelerator, model, **inputs)

    before = ones.clone()
    before[0, : LENGTH // 2] = 0  # all of what a rank would get without load balancing
    refused("padding before tokens", mask=before)
    packed = torch.cat([torch.arange(LENGTH // 2)] * 2).repeat(ROWS, 1)
    refused("packs several samples", positions=packed)
    accelerator = with_context_parallelism()
    model = accelerator.prepare(make())
    tokens = torch.zeros(ROWS, LENGTH, dtype=torch.long)
    with (
        accelerator.maybe_context_parallel([tokens], [1], {tokens}),
        pytest.raises(SettingsError, match="without position_ids"),
    ):
        model(tokens)
    with (
        accelerator.maybe_context_parallel([tokens], [1], {tokens}),
        pytest.raises(UnsupportedError, match="not of the shape"),
    ):
        model(tokens, attention_mask=torch.ones(ROWS, 1, 4, 4), position_ids=tokens)


@distributed(world_size=2)
def test_row_1_a_model_has_its_masks_outside_of_the_context():
    accelerator = with_context_parallelism()
    model = accelerator.prepare(make_llama())
    tokens = torch.randint(0, TOKENS, (ROWS, LENGTH), generator=torch.Generator().manual_seed(3))
    mask = torch.ones(ROWS, LENGTH, dtype=torch.long)
    mask[0, :5] = 0
    with torch.no_grad():
        found = model(input_ids=tokens, attention_mask=mask).logits
        wanted = make_llama()(input_ids=tokens, attention_mask=mask).logits
    torch.testing.assert_close(found[1], wanted[1], rtol=0, atol=1e-5)
    torch.testing.assert_close(found[0, 5:], wanted[0, 5:], rtol=0, atol=1e-5)


@distributed(world_size=2)
def test_row_2_ulysses_refuses_what_is_not_attention_by_its_layer():
    def refused(model, story):
        accelerator = with_sequence_parallelism()
        with pytest.raises(SettingsError, match=story):
            accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

    with deepspeed_process():
        refused(qwen3_next(), r"sp_size=2.*'model\.layers\.1\.linear_attn' is 'linear_attention'")
        model = make_llama()
        model.config.layer_types = ["full_attention", "linear_attention"]
        refused(model, r"'model\.layers\.1\.self_attn' is 'linear_attention'")
        model.config.layer_types = ["full_attention", "conv"]
        refused(model, r"is 'conv'")


@pytest.mark.parametrize("axis", ["fsdp_size", "tp_size"])
@distributed(world_size=2)
def test_row_22_a_model_that_transformers_sharded_at_load_is_not_wrapped_again(axis):
    """`distributed/fsdp/test_presharded.py` trains such models; the Trainer of transformers asks for this."""
    from transformers.distributed import DistributedConfig

    # What from_pretrained does before it reads the weights.
    config, _, mesh = LlamaForCausalLM.prepare_distribute_model(DistributedConfig(**{axis: 2}))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sharded = LlamaForCausalLM.maybe_distribute_model(make_llama(vocab_size=16), config, mesh)
    for options in ({}, {"parallelism_config": ParallelismConfig(tp_size=2)}):
        AcceleratorState._reset_state()
        accelerator = Accelerator(cpu=True, **options)
        prepared = accelerator.prepare_model(sharded, device_placement=False, evaluation_mode=True)
        assert prepared is sharded
        optimizer = accelerator.prepare(torch.optim.SGD(sharded.parameters(), lr=0.1))
        assert optimizer.param_groups[0]["params"][0] is next(sharded.parameters())
