"""Decoders that Megatron trains continue prompts as transformers does with the same weights."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from accel_plugins.megatron.plugin import MegatronLMPlugin
from accel_state.errors import UnsupportedError
from accel_train import Accelerator
from harness import distributed
from harness.cuda_names import cuda_answered_by_cpu

TOKENS = 33  # which two ranks cannot split evenly
PROMPTS = torch.tensor([[7, 8, 9, 10, 11], [0, 0, 3, 4, 5], [0, 21, 22, 23, 24]])
MASK = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1], [0, 1, 1, 1, 1]])


def initialised(model):
    """Make the model sure of some tokens, so that rounding changes no choice."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.3, generator=generator)
    model.generation_config.pad_token_id = 0
    return model.eval()


def make_gpt2():
    sizes = {"n_embd": 16, "n_layer": 4, "n_head": 4, "vocab_size": TOKENS, "n_positions": 24}
    return initialised(GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=1, eos_token_id=None)))


def make_llama():
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4, "vocab_size": TOKENS}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, eos_token_id=None)
    return initialised(LlamaForCausalLM(config))


def prepared(make, **options):
    accelerator = Accelerator(cpu=True, megatron_lm_plugin=MegatronLMPlugin(**options))
    model = make()
    return accelerator, *accelerator.prepare(model, torch.optim.AdamW(model.parameters()))


def ends_of(make):
    """Return a token that a greedy continuation of one prompt meets."""
    return int(make().generate(PROMPTS[:1], max_new_tokens=4)[0, -1])


PARALLEL = {
    "tensor": (make_llama, {"tp_degree": 2}),
    "sequence": (make_gpt2, {"tp_degree": 2, "sequence_parallelism": True}),
    "pipeline": (make_gpt2, {"pp_degree": 2}),
    "virtual stages": (
        make_llama,
        {"pp_degree": 2, "num_micro_batches": 2, "num_layers_per_virtual_pipeline_stage": 1},
    ),
}


def check_greedy(make, options):
    with cuda_answered_by_cpu():
        accelerator, model, _ = prepared(make, **options)
        sequences = model.megatron_generate(PROMPTS, MASK, max_new_tokens=12)
        end = ends_of(make)
        ended = model.megatron_generate(PROMPTS, MASK, max_length=17, eos_token_id=end)
        assert model.training
    plain = make()
    torch.testing.assert_close(sequences, plain.generate(PROMPTS, attention_mask=MASK, max_new_tokens=12))
    expected = plain.generate(PROMPTS, attention_mask=MASK, max_length=17, eos_token_id=end)
    torch.testing.assert_close(ended, expected)
    assert not torch.equal(ended, sequences)
    accelerator.free_memory()


@pytest.mark.parametrize("case", PARALLEL)
@distributed(world_size=2)
def test_two_ranks_continue_prompts_as_transformers(case):
    check_greedy(*PARALLEL[case])


@distributed(world_size=4)
def test_four_ranks_continue_prompts_as_transformers():
    check_greedy(make_llama, {"tp_degree": 2, "pp_degree": 2})


@pytest.mark.parametrize("case", ["tensor", "pipeline"])
@distributed(world_size=2)
def test_beams_find_what_those_of_transformers_find(case):
    make, options = PARALLEL[case]
    plain, end = make(), ends_of(make)
    with cuda_answered_by_cpu():
        accelerator, model, _ = prepared(make, **options)
        for penalty in (0.0, 1.0, 2.0):
            asked = {"num_beams": 3, "max_new_tokens": 6, "length_penalty": penalty, "eos_token_id": end}
            for row, mask in zip(PROMPTS.split(1), MASK.split(1), strict=True):
                sequences = model.megatron_generate(row, mask, **asked)
                torch.testing.assert_close(sequences, plain.generate(row, attention_mask=mask, **asked))
    accelerator.free_memory()


@distributed(world_size=2)
def test_prompts_that_are_padded_on_the_right_are_continued_in_place_of_their_padding():
    prompts = torch.stack([row.roll(-int(5 - mask.sum())) for row, mask in zip(PROMPTS, MASK, strict=True)])
    mask = torch.stack([row.roll(-int(5 - row.sum())) for row in MASK])
    with cuda_answered_by_cpu():
        accelerator, model, _ = prepared(make_llama, tp_degree=2)
        sequences = model.megatron_generate(prompts, mask, max_new_tokens=4, add_BOS=True)
    plain = make_llama()
    start = torch.tensor([plain.config.bos_token_id])
    for row, prompt, own in zip(sequences, prompts, mask, strict=True):
        prompt = torch.cat([start, prompt[: own.sum()]])[None]
        expected = plain.generate(prompt, max_new_tokens=4)
        torch.testing.assert_close(row[None, : expected.shape[1]], expected)
    accelerator.free_memory()


@pytest.mark.parametrize("case", ["tensor", "pipeline"])
@distributed(world_size=2)
def test_ranks_draw_the_same_tokens(case):
    make, options = PARALLEL[case]
    with cuda_answered_by_cpu():
        accelerator, model, _ = prepared(make, **options)
        torch.manual_seed(accelerator.process_index)
        drawn = [model.megatron_generate(PROMPTS, MASK, max_new_tokens=8, temperature=5.0) for _ in range(2)]
        torch.testing.assert_close(*accelerator.gather(drawn[0]).unsqueeze(0).chunk(2, 1))
        assert not torch.equal(*drawn)
        seeded = [
            model.megatron_generate(PROMPTS, MASK, max_new_tokens=8, top_k=20, temperature=5.0, random_seed=3)
            for _ in range(2)
        ]
        torch.testing.assert_close(*seeded)
        greedy = model.megatron_generate(PROMPTS, MASK, max_new_tokens=8)
        for options in ({"top_k": 1}, {"top_p": 1e-6}):
            sequences = model.megatron_generate(PROMPTS, MASK, max_new_tokens=8, temperature=5.0, **options)
            torch.testing.assert_close(sequences, greedy)
    accelerator.free_memory()


@distributed(world_size=2)
def test_further_options_are_those_of_transformers():
    plain, options = make_llama(), {"max_new_tokens": 6, "repetition_penalty": 5.0, "do_sample": False}
    with cuda_answered_by_cpu():
        accelerator, model, _ = prepared(make_llama, pp_degree=2)
        sequences = model.megatron_generate(PROMPTS, MASK, **options)
        torch.testing.assert_close(sequences, plain.generate(PROMPTS, attention_mask=MASK, **options))
        with pytest.raises(ValueError, match="max_tokens"):
            model.megatron_generate(PROMPTS, max_tokens=3)
    accelerator.free_memory()


@distributed(world_size=2)
def test_generation_follows_the_steps_of_the_optimizer():
    with cuda_answered_by_cpu():
        accelerator, model, optimizer = prepared(make_llama, tp_degree=2)
        optimizer.param_groups[0]["lr"] = 0.1
        accelerator.backward(model(input_ids=PROMPTS, labels=PROMPTS).loss)
        optimizer.step()
        sequences = model.megatron_generate(PROMPTS, MASK, max_new_tokens=6)
        weights = [accelerator.get_state_dict(model)]
        assert model.training
    torch.distributed.broadcast_object_list(weights)
    plain = make_llama()
    plain.load_state_dict(weights[0])
    torch.testing.assert_close(sequences, plain.generate(PROMPTS, attention_mask=MASK, max_new_tokens=6))
    accelerator.free_memory()


@distributed(world_size=2)
def test_models_that_do_not_generate_are_refused():
    with cuda_answered_by_cpu():
        sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
        model = BertForMaskedLM(BertConfig(**sizes, vocab_size=TOKENS))
        accelerator = Accelerator(cpu=True, megatron_lm_plugin=MegatronLMPlugin(tp_degree=2))
        model = accelerator.prepare(model)
        with pytest.raises(UnsupportedError, match="BertForMaskedLM does not generate"):
            model.megatron_generate(PROMPTS)
    accelerator.free_memory()
