"""Ulysses: ranks that shard sequences train a Llama of transformers as one process does."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as differentiable
from torch import nn
from torch.utils.data import DataLoader, Dataset
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from accel_plugins.deepspeed.plugin import DeepSpeedPlugin
from accel_plugins.kwargs import DataLoaderConfiguration
from accel_plugins.parallelism.config import DeepSpeedSequenceParallelConfig, ParallelismConfig
from accel_state.accelerator_state import AcceleratorState
from accel_state.errors import SettingsError
from accel_train import Accelerator
from harness import distributed
from harness.engines import deepspeed_process
from harness.small_llama import SIZES, make_llama

TOKENS, LENGTH, ROWS, PROMPT = SIZES["vocab_size"], 8, 2, 3


class Text(Dataset):
    """Prompts are not learnt, so that the parts of a sequence count differently."""

    def __init__(self, samples=8):
        self.rows = torch.randint(0, TOKENS, (samples, LENGTH), generator=torch.Generator().manual_seed(1))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        tokens = self.rows[index]
        labels = tokens.clone()
        labels[: PROMPT + index % 3] = -100
        return {"input_ids": tokens, "labels": labels}


def make_accelerator(plugin=None, size=2, handler=None, **options):
    copies = dist.get_world_size() // size
    config = ParallelismConfig(sp_size=size, dp_replicate_size=copies, sp_handler=handler)
    plugin = DeepSpeedPlugin(**plugin or {"zero_stage": 2})
    return Accelerator(cpu=True, deepspeed_plugin=plugin, parallelism_config=config, **options)


def loss_over_group(logits, labels, group):
    """The documented way: the losses of all parts, weighted with how many tokens each has learnt from."""
    tokens = (labels != -100).sum()
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / max(
        tokens, 1
    )
    losses = torch.stack(differentiable.all_gather(loss, group=group))
    counts = torch.stack(differentiable.all_gather(tokens, group=group))
    return (losses * counts).sum() / counts.sum()


def loss_of_part(logits, labels, group):
    """The same without a graph across processes: what this part adds to the mean."""
    tokens = (labels != -100).sum()
    dist.all_reduce(tokens, group=group)
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / tokens
    return loss * dist.get_world_size(group)


def plainly(model, *, copies, accumulation=1, clip=None, steps=None):
    """One process, plain PyTorch: every step has the batches of all copies."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    loader = [*DataLoader(Text(), batch_size=ROWS)]
    losses, norms = [], []
    per_step = copies * accumulation
    for first in range(0, len(loader), per_step):
        for batch in loader[first : first + per_step]:
            loss = model(**batch).loss
            losses.append(loss.item())
            (loss / per_step).backward()
        if clip is not None:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), clip).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms


def train(accelerator, model, optimizer, loader, *, clip=None, loss_of=loss_over_group):
    group = accelerator.torch_device_mesh["sp"].get_group()
    losses, norms = [], []
    for batch in loader:
        with accelerator.accumulate(model):
            labels = batch.pop("shift_labels")
            loss = loss_of(model(**batch, use_cache=False).logits, labels, group)
            accelerator.backward(loss)
            losses.append(loss.item())
            if clip is not None and accelerator.sync_gradients:
                norms.append(accelerator.clip_grad_norm_(model.parameters(), clip).item())
            optimizer.step()
            optimizer.zero_grad()
    return losses, norms


def assert_equal(accelerator, model, right, tolerance=1e-6):
    state = accelerator._parts.strategy.states.full_state_dict(model, exact=True)
    for name, value in right.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=0, atol=tolerance)


def check(stage, *, accumulation=1, clip=None, size=2, loss_of=loss_over_group, **options):
    accelerator = make_accelerator({"zero_stage": stage}, size, gradient_accumulation_steps=accumulation)
    copies = dist.get_world_size() // size
    model, right = make_llama(**options), make_llama(**options)
    wanted, right_norms = plainly(right, copies=copies, accumulation=accumulation, clip=clip)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    loader = DataLoader(Text(), batch_size=ROWS)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses, norms = train(accelerator, model, optimizer, loader, clip=clip, loss_of=loss_of)
    assert_equal(accelerator, model, right)
    assert norms == pytest.approx(right_norms, abs=1e-5)
    if loss_of is loss_over_group:
        expected = wanted[dist.get_rank() // size :: copies]
        assert losses == pytest.approx(expected, abs=1e-5)
    accelerator.free_memory()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@distributed(world_size=2)
def test_two_ranks_with_halves_of_each_sequence_train_as_one(stage):
    with deepspeed_process():
        check(stage, accumulation=2, clip=0.5)


@distributed(world_size=2)
def test_losses_may_also_be_gathered_without_a_graph():
    with deepspeed_process():
        check(2, loss_of=loss_of_part)


@distributed(world_size=4)
def test_two_copies_of_two_parts_train_as_one():
    with deepspeed_process():
        # torch's differentiable all_gather fails on gloo in groups without rank 0.
        check(3, clip=0.5, num_key_value_heads=1, loss_of=loss_of_part)


@distributed(world_size=2)
def test_evaluation_may_shard_sequences_or_see_them_whole():
    with deepspeed_process():
        core = ALL_ATTENTION_FUNCTIONS["sdpa"]
        accelerator, right = make_accelerator(), make_llama().eval()
        model = make_llama()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
        sharded = DataLoader(Text(5), batch_size=ROWS)  # the last batch has another number of rows
        model, optimizer, sharded = accelerator.prepare(model, optimizer, sharded)
        whole = accelerator.prepare(DataLoader(Text(5), batch_size=ROWS))
        model.eval()
        with torch.no_grad():
            for part, batch in zip(sharded, DataLoader(Text(5), batch_size=ROWS), strict=True):
                labels = part.pop("shift_labels")
                logits = model(**part, use_cache=False).logits
                wanted = right(input_ids=batch["input_ids"]).logits
                shard = wanted.chunk(2, dim=1)[dist.get_rank()]
                torch.testing.assert_close(logits, shard[: len(logits)], rtol=0, atol=1e-5)
                assert labels.shape == logits.shape[:2]
            for batch in whole:
                torch.testing.assert_close(model(**batch).loss, right(**batch).loss, rtol=0, atol=1e-5)
        model.train()
        batches = iter(whole)
        batch = next(batches)
        loss = model(**batch).loss  # sharded by the model itself, and averaged over the shards
        torch.testing.assert_close(loss, right(**batch).loss, rtol=0, atol=1e-5)
        batches.close()
        assert accelerator.deepspeed_ulysses_dl_adapter(whole, model) is whole
        assert next(iter(whole))["input_ids"].shape == (ROWS, LENGTH // 2)
        accelerator.free_memory()
        assert ALL_ATTENTION_FUNCTIONS["sdpa"] is core, "nothing of it is left for other models"


@distributed(world_size=2)
def test_loaders_of_others_go_through_the_adapter_of_deepspeed():
    """Every process has batches of its own; ranks that shard sequences take them in turn."""
    with deepspeed_process():
        accelerator, model, right = make_accelerator(), make_llama(), make_llama()
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.3))
        plainly(right, copies=1)
        positions = torch.arange(LENGTH).expand(ROWS, LENGTH)
        batches = [{**batch, "position_ids": positions} for batch in DataLoader(Text(), batch_size=ROWS)]
        loader = accelerator.deepspeed_ulysses_dl_adapter(batches[dist.get_rank() :: 2], model)
        assert len(loader) == len(batches)
        train(accelerator, model, optimizer, loader)
        assert_equal(accelerator, model, right)
        accelerator.free_memory()


@distributed(world_size=2)
def test_a_run_goes_on_where_it_was_saved(tmp_path):
    with deepspeed_process():
        ends = []
        for resumed in (False, True):
            continues = DataLoaderConfiguration(resume_mid_epoch=True)
            accelerator = make_accelerator({"zero_stage": 3}, dataloader_config=continues)
            model = make_llama()
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            loader = DataLoader(Text(), batch_size=ROWS, shuffle=True)
            torch.manual_seed(4)
            model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
            group = accelerator.torch_device_mesh["sp"].get_group()
            if resumed:
                accelerator.load_state(tmp_path / "here")
            for count, batch in enumerate(loader):
                labels = batch.pop("shift_labels")
                logits = model(**batch, use_cache=False).logits
                accelerator.backward(loss_over_group(logits, labels, group))
                optimizer.step()
                optimizer.zero_grad()
                if count == 1 and not resumed:
                    accelerator.save_state(tmp_path / "here", flush=False)
            state = accelerator._parts.strategy.states.full_state_dict(model)
            ends.append({name: value.clone() for name, value in state.items()})
            accelerator.free_memory()
        assert all(torch.equal(value, ends[1][name]) for name, value in ends[0].items())


@distributed(world_size=2)
def test_a_checkpoint_loads_without_sharded_sequences(tmp_path):
    with deepspeed_process():
        accelerator, model = make_accelerator({"zero_stage": 2}), make_llama()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(Text(), batch_size=ROWS))
        train(accelerator, model, optimizer, loader)
        accelerator.save_state(tmp_path / "here", flush=False)
        states = accelerator._parts.strategy.states
        right = states.full_optimizer_state(optimizer.optimizer, [model])
        weights = {name: value.clone() for name, value in states.full_state_dict(model).items()}
        accelerator.free_memory()
        AcceleratorState._reset_state()
        accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(zero_stage=3))
        model = make_llama()
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
        accelerator.load_state(tmp_path / "here")
        states = accelerator._parts.strategy.states
        found = states.full_optimizer_state(optimizer.optimizer, [model])
        for name, value in states.full_state_dict(model).items():
            torch.testing.assert_close(value, weights[name], rtol=0, atol=0)
        for number, values in right["state"].items():
            torch.testing.assert_close(found["state"][number], values, rtol=0, atol=0)
        accelerator.free_memory()


@distributed(world_size=2)
def test_what_cannot_be_divided_is_refused_on_every_rank():
    def refused(model, story, error=SettingsError, **handler):
        AcceleratorState._reset_state()
        accelerator = make_accelerator(handler=DeepSpeedSequenceParallelConfig(**handler))
        with pytest.raises(error, match=story):
            accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

    with deepspeed_process():
        refused(make_llama(num_attention_heads=1, num_key_value_heads=1), "has 1 attention heads")
        refused(make_llama(attn_implementation="eager"), "computes attention with 'eager'.*'sdpa'")
        refused(make_llama(), "computes attention with 'sdpa'", sp_attn_implementation="flash_attention_2")
        AcceleratorState._reset_state()
        config = ParallelismConfig(sp_size=2, sp_backend="torch")
        with pytest.raises(SettingsError, match=r"sp_backend='torch'.*DeepSpeedPlugin"):
            Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(), parallelism_config=config)
        AcceleratorState._reset_state()
        accelerator = make_accelerator(handler=DeepSpeedSequenceParallelConfig(sp_seq_length=6))
        model = make_llama()
        with pytest.raises(SettingsError, match="is not prepared"):
            accelerator.deepspeed_ulysses_dl_adapter([], model)
        loader = DataLoader(Text(), batch_size=ROWS)
        model, _, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
        with pytest.raises(SettingsError, match=r"\(2, 8\).*sp_seq_length=6"):
            next(iter(loader))
        accelerator.free_memory()


@pytest.mark.parametrize("batch", ["windows", "padding on the left", "packed samples"])
@distributed(world_size=2)
def test_masks_cover_full_sequences(batch):
    from transformers import MistralConfig, MistralForCausalLM

    tokens = Text().rows[:ROWS]
    inputs = {"input_ids": tokens}
    if batch == "padding on the left":
        inputs["attention_mask"] = torch.ones_like(tokens).index_fill(1, torch.arange(2), 0)
    if batch == "packed samples":
        inputs["position_ids"] = torch.tensor([0, 1, 2, 0, 1, 2, 3, 4]).expand(ROWS, LENGTH)
    with deepspeed_process():
        config = MistralConfig(**SIZES, sliding_window=4 if batch == "windows" else None)
        torch.manual_seed(3)
        accelerator, model = make_accelerator(), MistralForCausalLM(config)
        with torch.no_grad():
            wanted = model(**inputs, use_cache=False).logits.chunk(2, dim=1)[dist.get_rank()]
        loader = DataLoader([{name: value[i] for name, value in inputs.items()} for i in range(ROWS)], ROWS)
        model, _, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
        (shard,) = loader
        logits = model(**shard, use_cache=False).logits
        torch.testing.assert_close(logits, wanted, rtol=0, atol=1e-5)
        accelerator.free_memory()
