"""What Megatron's engine is given from loaders, and what is gathered of its outputs."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel

from accel_plugins.megatron.data import MegatronLMDummyDataLoader
from accel_plugins.megatron.library import core
from accel_plugins.megatron.plugin import MegatronLMPlugin
from accel_state.errors import SettingsError, UnsupportedError
from accel_train import Accelerator
from harness import distributed
from harness.cuda_names import cuda_answered_by_cpu

TOKENS, LENGTH = 32, 8


def make_gpt2():
    torch.manual_seed(0)
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 4, "vocab_size": TOKENS, "n_positions": 16}
    return GPT2LMHeadModel(GPT2Config(**sizes, attn_pdrop=0, embd_pdrop=0, resid_pdrop=0))


def make_tokens(number):
    return torch.randint(0, TOKENS, (number, LENGTH), generator=torch.Generator().manual_seed(1))


class Stream(IterableDataset):
    """Samples without a length."""

    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        return iter(self.rows)


@pytest.mark.parametrize(
    ("options", "number"),
    [
        ({}, 6),
        ({"tp_degree": 2}, 6),
        ({"num_micro_batches": 2}, 7),
        ({"pp_degree": 2, "num_micro_batches": 2}, 7),
        ({"tp_degree": 2, "num_micro_batches": 4}, 3),
    ],
    ids=["replicas", "tensor", "micro-batches", "pipeline", "fewer samples than micro-batches"],
)
@distributed(world_size=2)
def test_metrics_are_gathered_of_every_sample_once(options, number):
    tokens = make_tokens(number)
    with cuda_answered_by_cpu():
        plugin = MegatronLMPlugin(return_logits=True, **options)
        accelerator = Accelerator(cpu=True, megatron_lm_plugin=plugin)
        replicas = accelerator._parts.strategy.sharding.num_shards
        rows = [{"input_ids": row, "labels": row} for row in tokens]
        size = 4 // replicas // plugin.num_micro_batches
        loaders = DataLoader(rows, batch_size=size), DataLoader(Stream(rows), batch_size=size)
        model = make_gpt2()
        model, _, *loaders = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), *loaders)
        with torch.no_grad():
            expected = make_gpt2().eval()(input_ids=tokens).logits
        for is_trained, loader in ((False, loaders[0]), (False, loaders[1]), (True, loaders[0])):
            model.train(is_trained)
            logits, labels = [], []
            for batch in loader:
                outputs = model(**batch)
                losses = accelerator.gather(outputs.loss[None])
                torch.testing.assert_close(losses, outputs.loss.expand(2))
                assert len(accelerator.gather(outputs.logits)) == 2 * len(outputs.logits)
                gathered = accelerator.gather_for_metrics((outputs.logits, batch["labels"]))
                logits.append(gathered[0])
                labels.append(gathered[1])
            assert torch.equal(torch.cat(labels), tokens)
            torch.testing.assert_close(torch.cat(logits), expected, rtol=1e-5, atol=1e-5)
    accelerator.free_memory()


@distributed(world_size=2)
def test_a_batch_is_read_by_its_tokens_and_refused_where_the_model_has_none_of_them():
    tokens = make_tokens(4)
    labels = tokens.clone()
    labels[:, :3] = -100
    with cuda_answered_by_cpu():
        plugin = MegatronLMPlugin(pp_degree=2, num_micro_batches=2)
        accelerator = Accelerator(cpu=True, megatron_lm_plugin=plugin)
        model = make_gpt2()
        model, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        model.eval()
        expected = model(input_ids=tokens, labels=labels).loss
        batch = {"step": torch.tensor(1), "features": torch.zeros(4, 3), "input_ids": tokens}
        torch.testing.assert_close(model(**batch, labels=labels).loss, expected)
        with pytest.raises(SettingsError, match=r"words of 8, others of 3.*input_ids.*custom_get_batch"):
            model(words=tokens, others=tokens[:, :3])
        with pytest.raises(SettingsError, match=r"of 24 tokens.*GPT2LMHeadModel has 16 positions"):
            model(input_ids=tokens.repeat(1, 3))
        for name, wrong in (("input_ids", TOKENS), ("labels", TOKENS), ("labels", -1)):
            batch = {"input_ids": tokens, "labels": labels}
            batch[name] = batch[name].index_fill(1, torch.tensor([5]), wrong)
            with pytest.raises(RuntimeError, match=rf"{name}.*from 0 to {TOKENS - 1}"):
                model(**batch)
    accelerator.free_memory()


def make_samples(number):
    """Samples with the names of Megatron's data sets; the last label of each is left out."""
    mask = torch.ones(LENGTH)
    mask[-1] = 0
    return [
        {"tokens": row, "labels": row.roll(-1), "loss_mask": mask, "position_ids": torch.arange(LENGTH)}
        for row in make_tokens(number)
    ]


@distributed(world_size=2)
def test_data_sets_of_the_users_function_are_read_by_every_replica_in_shares():
    asked = []

    def provide(numbers):
        asked.append(tuple(numbers))
        return make_samples(8), make_samples(4), None

    with cuda_answered_by_cpu():
        plugin = MegatronLMPlugin(
            train_iters=2,
            eval_iters=1,
            gradient_clipping=0.0,
            custom_megatron_datasets_provider_function=provide,
        )
        accelerator = Accelerator(cpu=True, megatron_lm_plugin=plugin)
        data = MegatronLMDummyDataLoader(micro_batch_size=2)
        model = make_gpt2()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, training, validation = accelerator.prepare(model, optimizer, data, data)
        assert asked == [(8, 4, 4)]
        assert len(validation) == 1
        losses = []
        for batch in training:
            assert batch["tokens"].shape == (2, LENGTH)
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    plain = make_gpt2()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    expected = []
    for tokens in make_tokens(8).chunk(2):
        loss = plain(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-5)
    accelerator.free_memory()


@distributed(world_size=2)
def test_indexed_data_sets_of_encoders_need_a_function_of_the_user():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = BertForMaskedLM(BertConfig(**sizes, vocab_size=TOKENS))
    with cuda_answered_by_cpu():
        accelerator = Accelerator(cpu=True, megatron_lm_plugin=MegatronLMPlugin(tp_degree=2, train_iters=2))
        data = MegatronLMDummyDataLoader(data_path=["corpus"], seq_length=LENGTH, micro_batch_size=2)
        with pytest.raises(UnsupportedError, match=r"'bert'.*custom_megatron_datasets_provider_function"):
            accelerator.prepare(model, torch.optim.AdamW(model.parameters()), data)
        assert not core("parallel_state").model_parallel_is_initialized()
