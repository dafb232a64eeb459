"""Megatron's engine trains BERT and T5 of transformers as one process of plain PyTorch does."""

from __future__ import annotations

import functools

import pytest
import torch
from torch.utils.data import DataLoader
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForPreTraining,
    BertForSequenceClassification,
    T5Config,
    T5ForConditionalGeneration,
)

from accel_plugins.megatron.library import core
from accel_plugins.megatron.plugin import MegatronLMPlugin
from accel_state.errors import SettingsError, UnsupportedError
from accel_train import Accelerator
from harness import distributed
from harness.cuda_names import cuda_answered_by_cpu

TOKENS, LENGTH, STEPS, SAMPLES = 33, 8, 8, 4


def make_bert(kind, **options):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    dropouts = {"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}
    config = BertConfig(**sizes, **dropouts, vocab_size=TOKENS, max_position_embeddings=16, **options)
    return kind(config)


def make_t5(**options):
    torch.manual_seed(0)
    sizes = {"d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_decoder_layers": 4, "num_heads": 4}
    config = T5Config(**sizes, vocab_size=TOKENS, dropout_rate=0, decoder_start_token_id=0, **options)
    return T5ForConditionalGeneration(config)


MODELS = {
    "pretraining": lambda: make_bert(BertForPreTraining),
    "masked tokens": lambda: make_bert(BertForMaskedLM),
    "classes": lambda: make_bert(BertForSequenceClassification, num_labels=3),
    "t5": make_t5,
    "gated t5": lambda: make_t5(feed_forward_proj="gated-gelu"),
}


def make_rows(name):
    """Samples with padding, and as many labels each."""
    generator = torch.Generator().manual_seed(1)
    rows = []
    for number in range(STEPS * SAMPLES):
        tokens = torch.randint(1, TOKENS, (LENGTH,), generator=generator)
        mask = torch.ones_like(tokens)
        mask[LENGTH - 2 * (number % 2) :] = 0
        row = {"input_ids": tokens, "attention_mask": mask}
        if "t5" in name:
            row["labels"] = torch.randint(1, TOKENS, (LENGTH - 2,), generator=generator)
            row["labels"][-1] = -100
        elif name == "classes":
            row["labels"] = tokens[0] % 3
        else:
            row["labels"] = tokens.clone()
            row["labels"][4:] = -100
            row["token_type_ids"] = (torch.arange(LENGTH) > 3).long()
            if name == "pretraining":
                row["next_sentence_label"] = tokens[1] % 2
        rows.append(row)
    return rows


def make_optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)  # small gradients have few digits


@functools.cache
def train_plainly(name, clipping):
    model = MODELS[name]()
    optimizer = make_optimizer(model)
    losses = []
    for batch in DataLoader(make_rows(name), batch_size=SAMPLES):
        loss = model(**batch).loss
        loss.backward()
        if clipping:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clipping)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model


def train(name, plugin):
    accelerator = Accelerator(cpu=True, megatron_lm_plugin=plugin)
    model = MODELS[name]()
    optimizer = make_optimizer(model)
    replicas = accelerator._parts.strategy.sharding.num_shards
    loader = DataLoader(make_rows(name), batch_size=SAMPLES // replicas // plugin.num_micro_batches)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for batch in loader:
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return accelerator, model, losses


def check_outputs(plain, batch, outputs):
    """Compare outputs with those of a model of transformers that has the same weights."""
    plain.eval()
    with torch.no_grad():
        expected = plain(**batch)
    assert type(outputs) is type(expected)
    names = {"logits", "prediction_logits", "seq_relationship_logits"} & {*expected}
    assert names == {*outputs} - {"loss"}
    for name in names:
        logits, right = outputs[name], expected[name]
        if plain.config.model_type == "bert" and right.ndim == 3:  # what follows padded tokens is not used
            right, logits = (values[batch["attention_mask"].bool()] for values in (right, logits))
        torch.testing.assert_close(logits, right, rtol=0, atol=1e-5)


def check_equal(name, options):
    options = {"gradient_clipping": 0.5} | options
    with cuda_answered_by_cpu():
        plugin = MegatronLMPlugin(return_logits=True, **options)
        accelerator, model, losses = train(name, plugin)
        state = accelerator.get_state_dict(model)
        batch = next(iter(DataLoader(make_rows(name), batch_size=SAMPLES)))
        model.eval()
        outputs = model(**batch)
    expected, plain = train_plainly(name, options["gradient_clipping"])
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-5)
    if accelerator.is_main_process:
        torch.testing.assert_close(state, dict(plain.state_dict()), rtol=1e-5, atol=1e-5)
        plain.load_state_dict(state)
        check_outputs(plain, batch, outputs)
    accelerator.free_memory()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("pretraining", {"tp_degree": 2}),
        ("pretraining", {"pp_degree": 2, "num_micro_batches": 2}),
        ("masked tokens", {"use_distributed_optimizer": True, "num_micro_batches": 2}),
        pytest.param("classes", {"tp_degree": 2, "gradient_clipping": 0.0}, marks=pytest.mark.thorough),
        pytest.param(
            "pretraining", {"tp_degree": 2, "sequence_parallelism": True}, marks=pytest.mark.thorough
        ),
        pytest.param("classes", {"tp_degree": 2, "sequence_parallelism": True}, marks=pytest.mark.thorough),
        pytest.param("t5", {"tp_degree": 2, "num_micro_batches": 2}, marks=pytest.mark.thorough),
        ("t5", {"tp_degree": 2, "sequence_parallelism": True}),
        ("gated t5", {"use_distributed_optimizer": True}),
    ],
    ids=str,
)
@distributed(world_size=2)
def test_two_ranks_train_encoders_as_one_process(name, options):
    check_equal(name, options)


@distributed(world_size=2)
def test_what_megatron_does_not_compute_of_an_encoder_is_refused():
    with cuda_answered_by_cpu():
        plugin = MegatronLMPlugin(context_parallel_size=2)
        accelerator = Accelerator(cpu=True, megatron_lm_plugin=plugin)
        model = MODELS["masked tokens"]()
        with pytest.raises(UnsupportedError, match=r"'bert'.* context_parallel_size=2"):
            accelerator.prepare(model, make_optimizer(model))
        accelerator.free_memory()
        plugin = MegatronLMPlugin(pp_degree=2, num_micro_batches=2)
        accelerator = Accelerator(cpu=True, megatron_lm_plugin=plugin)
        with pytest.raises(SettingsError, match=r"an encoder and a decoder by pp_degree=2") as caught:
            accelerator.prepare(make_t5())
        assert "\n" not in str(caught.value)
        assert not core("parallel_state").model_parallel_is_initialized()
        accelerator.free_memory()
        accelerator = Accelerator(cpu=True, megatron_lm_plugin=MegatronLMPlugin(recompute_activations=True))
        with pytest.raises(UnsupportedError, match=r"'t5'.* recompute_granularity='selective'"):
            accelerator.prepare(make_t5())
        accelerator.free_memory()
        accelerator = Accelerator(cpu=True, megatron_lm_plugin=MegatronLMPlugin())
        model = make_bert(BertForMaskedLM)
        model.extra = torch.nn.Linear(1, 1)
        with pytest.raises(SettingsError, match=r"weights without a row.*extra\.weight, extra\.bias"):
            accelerator.prepare(model, make_optimizer(model))
        with pytest.raises(UnsupportedError, match="hidden_act='tanh'"):
            accelerator.prepare(make_bert(BertForMaskedLM, hidden_act="tanh"))
    accelerator.free_memory()
