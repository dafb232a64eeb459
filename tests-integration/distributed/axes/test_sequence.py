"""Ulysses on FSDP2 alone: masks, losses and gradients of one process, data, checkpoints, refusals."""

from __future__ import annotations

import os
import warnings
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.mistral import modeling_mistral

from accel_plugins.fsdp.plugin import FullyShardedDataParallelPlugin
from accel_plugins.parallelism.config import ParallelismConfig
from accel_plugins.parallelism.sequence import (
    gather_sequence,
    sequence_parallel_attention,
    sequence_parallel_loss,
)
from accel_state.accelerator_state import AcceleratorState
from accel_state.errors import SettingsError, UnsupportedError
from accel_train import Accelerator
from harness import cases, distributed
from harness.small_llama import SIZES, make_llama

TOKENS, LENGTH, ROWS, WINDOW, MAX_NORM = SIZES["vocab_size"], 8, 8, 2, 0.5


def make(family, config, **options):
    torch.manual_seed(0)
    return family(config(**SIZES | options))


def mixtral():
    model = make(MixtralForCausalLM, MixtralConfig, num_local_experts=4, num_experts_per_tok=2)
    model.set_experts_implementation("eager")  # others know no float64
    with torch.no_grad():
        for parameter in model.parameters():  # experts are left uninitialised by the constructor
            parameter.normal_(std=0.2)
    return model


MISTRAL = partial(make, MistralForCausalLM, MistralConfig, sliding_window=3)
FAMILIES = {
    "grouped heads": make_llama,
    "a head of keys for each": partial(make_llama, num_key_value_heads=4),
    "one head of keys": partial(make_llama, num_key_value_heads=1),
    "eager": partial(make_llama, attn_implementation="eager"),
    "mistral": MISTRAL,
    "gemma2": partial(
        make, Gemma2ForCausalLM, Gemma2Config, sliding_window=3, head_dim=4, attn_implementation="eager"
    ),
    "gemma3": partial(
        make,
        Gemma3ForCausalLM,
        Gemma3TextConfig,
        sliding_window=3,
        head_dim=4,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "mixtral": mixtral,
}


def text(kind="plain", number=ROWS):
    """Rows of a data set; the labels that count are unevenly distributed over each sequence."""
    tokens = torch.randint(0, TOKENS, (number, LENGTH), generator=torch.Generator().manual_seed(1))
    rows = []
    for index, row in enumerate(tokens):
        labels = row.clone()
        labels[: 2 + index % 4] = -100
        sample = {"input_ids": row, "labels": labels}
        if kind == "packed":
            first = 3 + index % 3  # at another token than where a shard begins
            sample["position_ids"] = torch.cat([torch.arange(first), torch.arange(LENGTH - first)])
        if kind == "padded":
            sample["attention_mask"] = (torch.arange(LENGTH) >= index % 3).long()
            labels[: index % 3 + 1] = -100
        if kind == "padded on the right":
            sample["attention_mask"] = (torch.arange(LENGTH) < LENGTH - index % 3).long()
            labels[LENGTH - index % 3 :] = -100
        rows.append(sample)
    return rows


def accelerate(sp, *, accumulation=WINDOW, plugin=None, **axes):
    AcceleratorState._reset_state()
    axes = axes or {"dp_shard_size": dist.get_world_size() // sp}
    return Accelerator(
        cpu=True,
        fsdp_plugin=FullyShardedDataParallelPlugin(**plugin or {}, fsdp_version=2),
        parallelism_config=ParallelismConfig(sp_size=sp, **axes),
        gradient_accumulation_steps=accumulation,
    )


def train_alone(model, rows, per_step):
    """Plain PyTorch in one process: a loss for each micro-batch of one row, whose mean is taken."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)
    losses, norms, gradients = [], [], []
    for first in range(0, len(rows), per_step):
        for row in rows[first : first + per_step]:
            batch = {name: value[None] for name, value in row.items()}
            loss = model(**batch, use_cache=False).loss
            (loss / per_step).backward()
            losses.append(loss.item())
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, gradients


def train(accelerator, model, rows):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)
    loader = DataLoader(rows, batch_size=1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses, norms, gradients = [], [], []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            losses.append(loss.item())
            if accelerator.sync_gradients:
                gradients.append({name: p.grad.full_tensor() for name, p in model.named_parameters()})
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)))
            optimizer.step()
            optimizer.zero_grad()
    return model, optimizer, (losses, norms, gradients)


def check(family, kind, sp, *, number=ROWS, atol=2e-6, **options):
    accelerator = accelerate(sp, **options)
    shards = accelerator._parts.strategy.sharding.num_shards
    make_model = FAMILIES.get(family, family)
    rows, alone = text(kind, number), make_model().double()
    losses, norms, gradients = train_alone(alone, rows, WINDOW * shards)
    model, _, found = train(accelerator, make_model().double(), rows)
    shard = accelerator._parts.strategy.sharding.shard_index
    # transformers computes losses and norms of layers in float32.
    torch.testing.assert_close(found[0], losses[shard::shards], rtol=0, atol=atol)
    torch.testing.assert_close(found[1], norms, rtol=0, atol=atol)
    for step, expected in zip(found[2], gradients, strict=True):
        for name, value in expected.items():
            torch.testing.assert_close(step[name], value, rtol=0, atol=atol, msg=partial(named, name))
    state = accelerator._parts.strategy.states.full_state_dict(model)
    for name, value in alone.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=0, atol=atol, msg=partial(named, name))
    accelerator.free_memory()


def named(name, text):
    return f"{name}: {text}"


EAGER = {"eager", "gemma2"}  # gives NaN for a row of padding, in float64


@pytest.mark.parametrize(
    "family", cases(FAMILIES, always={"grouped heads", "one head of keys", "gemma3", "mixtral"})
)
@distributed(world_size=2)
def test_two_shards_train_as_one_process(family):
    padded = "padded on the right" if family in EAGER else "padded"
    for kind in ("plain", "packed", padded):
        check(family, kind, sp=2)


@pytest.mark.parametrize("family", ["grouped heads", "mistral"])
@distributed(world_size=4)
def test_four_ranks_train_as_one_process(family):
    check(family, "packed", sp=4)
    check(family, "padded", sp=2)


# Attention of one's own


class Reader(nn.Module):
    """Two layers of causal attention within the samples of a sequence, in float64."""

    def __init__(self, heads, shared):
        super().__init__()
        torch.manual_seed(0)
        self.sizes, width = (heads, shared, shared), 2 * heads
        self.attention = sequence_parallel_attention(nn.functional.scaled_dot_product_attention)
        self.embed, self.place = nn.Embedding(TOKENS, width), nn.Embedding(LENGTH, width)
        self.layers = nn.ModuleList([nn.Linear(width, 2 * sum(self.sizes)) for _ in range(2)])
        self.head = nn.Linear(width, TOKENS)
        self.double()

    def forward(self, input_ids, position_ids):
        positions = gather_sequence(position_ids)
        sample = (positions == 0).cumsum(1)
        mask = (sample[:, :, None] == sample[:, None]).tril()[:, None]
        x = self.embed(input_ids) + self.place(position_ids)
        for layer in self.layers:
            heads = layer(x).unflatten(-1, (-1, 2)).transpose(1, 2).split(self.sizes, dim=1)
            seen = self.attention(*heads, attn_mask=mask, enable_gqa=True)
            x = x + seen.transpose(1, 2).flatten(2)
        return self.head(x)


def sum_of_losses(logits, labels):
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def check_own_attention(sp, *sizes, counted=False):
    accelerator, alone = accelerate(sp, accumulation=1), Reader(*sizes)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    model = Reader(*sizes)
    loader = DataLoader(text("packed"), batch_size=2)
    model, prepared, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    shards = dist.get_world_size() // sp
    for step, batch in enumerate(loader):
        wanted, items = [], []
        for full in [*DataLoader(text("packed"), batch_size=2)][step * shards : (step + 1) * shards]:
            labels = nn.functional.pad(full["labels"], (0, 1), value=-100)[:, 1:]
            wanted.append(sum_of_losses(alone(full["input_ids"], full["position_ids"]), labels))
            items.append((labels != -100).sum())
        if counted:
            (sum(wanted) / sum(items)).backward()
        else:
            sum(a / b for a, b in zip(wanted, items, strict=True)).div(shards).backward()
        labels = batch.pop("shift_labels")
        loss, count = sum_of_losses(model(**batch), labels), (labels != -100).sum()
        if counted:
            accelerator.backward(loss, num_items=count)
        else:
            loss = sequence_parallel_loss(loss, count)
            accelerator.backward(loss)
            shard = accelerator._parts.strategy.sharding.shard_index
            torch.testing.assert_close(loss, wanted[shard] / items[shard], rtol=0, atol=1e-12)
        for ours, right in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(ours.grad.full_tensor(), right.grad, rtol=0, atol=1e-12)
        for each in (prepared, optimizer):
            each.step()
            each.zero_grad()
    accelerator.free_memory()
    assert sequence_parallel_loss(torch.tensor(6.0), 3) == 2


@pytest.mark.parametrize("counted", [False, True])
@distributed(world_size=2)
def test_attention_of_ones_own_sees_full_sequences(counted):
    check_own_attention(2, 4, 2, counted=counted)
    check_own_attention(2, 6, 3, counted=counted)  # neither a multiple nor a divisor
    check_own_attention(2, 2, 1, counted=counted)


@pytest.mark.parametrize("counted", [False, True])
@distributed(world_size=4)
def test_attention_of_ones_own_sees_full_sequences_at_four_ranks(counted):
    check_own_attention(4, 4, 2, counted=counted)
    check_own_attention(2, 4, 4, counted=counted)


# With other parts


@distributed(world_size=4)
def test_axes_and_recomputation_go_together():
    recomputing = {
        "activation_checkpointing": True,
        "auto_wrap_policy": "transformer_based_wrap",
        "transformer_cls_names_to_wrap": ["MistralDecoderLayer"],
    }
    check("mistral", "packed", 2, dp_replicate_size=2, plugin=recomputing)
    check("mistral", "plain", 2, dp_shard_size=2, plugin=recomputing)


@distributed(world_size=2)
def test_the_ranks_of_a_sequence_share_experts():
    check("mixtral", "packed", 2, ep_size=2)


@distributed(world_size=4)
def test_ranks_of_several_sequences_share_experts():
    check("mixtral", "packed", 2, dp_shard_size=2, ep_size=4)
    check("mixtral", "plain", 2, dp_replicate_size=2, ep_size=2)


@distributed(world_size=2)
def test_a_count_over_all_processes_is_used_as_it_is():
    """The documented way to count the tokens of an accumulation window, unchanged."""
    accelerator, rows, alone = accelerate(2), text()[:WINDOW], make_llama()
    batches = [{name: value[None] for name, value in row.items()} for row in rows]
    total = sum((batch["labels"][:, 1:] != -100).sum() for batch in batches)
    for batch in batches:
        alone(**batch, num_items_in_batch=total).loss.backward()
    model = make_llama()
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(rows, batch_size=1)
    )
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch, num_items_in_batch=total).loss
            accelerator.backward(loss * accelerator.num_processes * WINDOW)
            if not accelerator.sync_gradients:
                optimizer.step()
                optimizer.zero_grad()
    for ours, right in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), right.grad, rtol=0, atol=1e-6)
    accelerator.free_memory()


@distributed(world_size=2)
def test_evaluation_and_generation_see_full_sequences_and_all_is_restored():
    core, create = ALL_ATTENTION_FUNCTIONS["sdpa"], modeling_mistral.create_sliding_window_causal_mask
    accelerator, alone = accelerate(2, accumulation=1), MISTRAL().eval()
    model = MISTRAL()
    rows = text("packed")[:2]
    model, _, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(rows, batch_size=2)
    )
    full_loader = accelerator.prepare(DataLoader(rows, batch_size=2))
    model.eval()
    full = next(iter(DataLoader(rows, batch_size=2)))
    for batch in loader:
        part = model(**batch)
        torch.testing.assert_close(part.loss, alone(**full, use_cache=False).loss, rtol=0, atol=1e-5)
        prompt = full["input_ids"][:, :4]
        texts = [each.generate(prompt, max_new_tokens=3, do_sample=False) for each in (model, alone)]
        assert torch.equal(*texts)
    for batch in full_loader:
        torch.testing.assert_close(
            model(**batch, use_cache=False).loss, alone(**full, use_cache=False).loss, rtol=0, atol=1e-5
        )
        model.train()
        with pytest.raises(SettingsError, match="does not shard their sequences"):
            model(batch["input_ids"])
        trained = model(**batch).loss
        torch.testing.assert_close(trained, alone(**full, use_cache=False).loss, rtol=0, atol=1e-5)
        trained.backward()
    assert accelerator.deepspeed_ulysses_dl_adapter(full_loader, model) is full_loader
    assert next(iter(full_loader))["input_ids"].shape == (2, LENGTH // 2)
    with pytest.raises(SettingsError, match="list is not prepared, and adapting it needs DeepSpeed"):
        accelerator.deepspeed_ulysses_dl_adapter([], model)
    other = MISTRAL().eval()  # of the same family, and not prepared
    torch.testing.assert_close(
        other(**full, use_cache=False).loss, alone(**full, use_cache=False).loss, rtol=0, atol=0
    )
    accelerator.free_memory()
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is core
    assert modeling_mistral.create_sliding_window_causal_mask is create


@pytest.mark.thorough  # it is compiled
@pytest.mark.parametrize("kind", ["plain", "packed"])
@distributed(world_size=2)
def test_flex_attention_sees_full_sequences_and_torch_trains_it_on_gpus_only(kind):
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor")  # torch's compiler asks for it
    warnings.filterwarnings("ignore", "_compile flag on create_block_mask")  # transformers passes it
    accelerator, rows = accelerate(2, accumulation=1), text(kind)[:2]
    wide = {"hidden_size": 64, "num_attention_heads": 4}
    alone = make_llama(**wide).eval()
    model, loader = accelerator.prepare(
        make_llama(**wide, attn_implementation="flex_attention"), DataLoader(rows, batch_size=2)
    )
    full = next(iter(DataLoader(rows, batch_size=2)))
    for batch in loader:
        with torch.no_grad(), mock.patch.dict(os.environ):  # torch's compiler sets a variable
            loss = model.eval()(**batch).loss
        torch.testing.assert_close(loss, alone(**full, use_cache=False).loss, rtol=0, atol=1e-5)
        with (
            mock.patch.dict(os.environ),
            pytest.raises(NotImplementedError, match="FlexAttention does not support backward on CPU"),
        ):
            model.train()(**batch)
    accelerator.free_memory()


@distributed(world_size=2)
def test_a_second_run_in_a_process_exchanges_heads_once():
    core = ALL_ATTENTION_FUNCTIONS["sdpa"]
    first = accelerate(2)
    model = first.prepare(make_llama())
    check("grouped heads", "plain", sp=2)
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is not core, "the first run still has a model"
    first.free_memory()
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is core
    del model


@distributed(world_size=2)
def test_a_state_is_loaded_under_these_and_other_sizes(tmp_path):
    accelerator = accelerate(2)
    model, optimizer, _ = train(accelerator, make_llama(), text("packed"))
    accelerator.save_state(tmp_path / "state", flush=False)
    expected = accelerator._parts.strategy.states.full_state_dict(model)
    moments = accelerator._parts.strategy.states.full_optimizer_state(optimizer.optimizer, [model])
    accelerator.free_memory()
    for sizes in ({"sp_size": 2}, {"dp_shard_size": 2}, {}):
        AcceleratorState._reset_state()
        options = {"parallelism_config": ParallelismConfig(**sizes)} if sizes else {}
        accelerator = Accelerator(cpu=True, **options)
        model = make_llama()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        loader = DataLoader(text("packed"), batch_size=1)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        accelerator.load_state(tmp_path / "state")
        persister = accelerator._parts.strategy.states
        for name, value in persister.full_state_dict(model).items():
            assert torch.equal(value, expected[name]), (sizes, name)
        loaded = persister.full_optimizer_state(optimizer.optimizer, [model])
        for key, state in moments["state"].items():
            assert torch.equal(loaded["state"][key]["exp_avg"], state["exp_avg"]), (sizes, key)
        accelerator.free_memory()


# Refusals


@distributed(world_size=2)
def test_what_would_be_wrong_is_refused_by_name():
    def refused(model, story):
        with pytest.raises(SettingsError, match=story):
            accelerate(2).prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

    refused(make_llama(num_attention_heads=1, num_key_value_heads=1), "has 1 attention heads.*sp_size=2")
    model = make_llama()
    model.config.layer_types = ["full_attention", "linear_attention"]
    refused(model, r"sp_size=2.*'model\.layers\.1\.self_attn' is 'linear_attention'")
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    refused(make_llama(rope_parameters=rope), "rope_type='dynamic', which depends on the longest position")
    sinks = make(
        GptOssForCausalLM,
        GptOssConfig,
        head_dim=4,
        num_local_experts=2,
        num_experts_per_tok=1,
        attn_implementation="eager",
    )
    refused(sinks, r"'model\.layers\.0\.self_attn' has sinks")


@distributed(world_size=2)
def test_a_step_that_would_be_wrong_is_refused():
    accelerator, model = accelerate(2, accumulation=1), make_llama()
    plain, forgetful = nn.Linear(4, 4), Reader(2, 2)
    forgetful.attention = nn.functional.scaled_dot_product_attention
    model, plain, forgetful, loader = accelerator.prepare(
        model, plain, forgetful, DataLoader(text(), batch_size=2)
    )
    for batch in loader:
        tokens, positions = batch["input_ids"], batch["position_ids"]
        with pytest.raises(SettingsError, match="without position_ids"):
            model(input_ids=tokens)
        with pytest.raises(SettingsError, match="labels without shift_labels"):
            model(input_ids=tokens, position_ids=positions, labels=tokens)
        with pytest.raises(UnsupportedError, match=r"Linear.*no attention saw full sequences"):
            plain(torch.ones(1, 4))
        assert set(batch) == {"input_ids", "position_ids", "shift_labels"}
        break
    odd = DataLoader([{"input_ids": torch.ones(7).long()}] * 2, batch_size=2)
    odd, _ = accelerator.prepare(odd, nn.Linear(4, 4))
    with pytest.raises(SettingsError, match=r"\(2, 7\): the length 7 is not a multiple of 2; pad"):
        next(iter(odd))
    accelerator.free_memory()
