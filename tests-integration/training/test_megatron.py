"""Megatron's engine trains models of transformers as one process of plain PyTorch does."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from accel_plugins.kwargs.dataloader import DataLoaderConfiguration
from accel_plugins.megatron.plugin import MegatronLMPlugin
from accel_train import Accelerator
from harness import distributed
from harness.cuda_names import cuda_answered_by_cpu

TOKENS, LENGTH, STEPS, SAMPLES = 32, 8, 20, 4


def make_gpt2():
    torch.manual_seed(0)
    sizes = {"n_embd": 16, "n_layer": 4, "n_head": 4, "vocab_size": TOKENS, "n_positions": 16}
    return GPT2LMHeadModel(GPT2Config(**sizes, attn_pdrop=0, embd_pdrop=0, resid_pdrop=0))


def make_llama():
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=TOKENS,
        )
    )


def make_rows():
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(0, TOKENS, (STEPS * SAMPLES, LENGTH), generator=generator)
    return [{"input_ids": row, "labels": row} for row in rows]


def make_optimizer(model):
    norms = [one for one in model.parameters() if one.ndim == 1]
    others = [one for one in model.parameters() if one.ndim > 1]
    groups = [{"params": others, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0, "lr": 3e-3}]
    return torch.optim.AdamW(groups, lr=1e-2)


def train_plainly(make, steps, clipping):
    """Train one model in one process, on the same samples."""
    model = make()
    optimizer = make_optimizer(model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    losses = []
    rows = make_rows()
    for start in range(0, len(rows), len(rows) // steps):
        tokens = torch.stack([row["input_ids"] for row in rows[start : start + len(rows) // steps]])
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        if clipping:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clipping)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        logits = model(input_ids=tokens).logits
    return losses, model.state_dict(), logits


def train(make, plugin, accumulation=1, **options):
    """Train by Megatron; a step has `SAMPLES` samples of all ranks and micro-batches."""
    accelerator = Accelerator(
        cpu=True,
        megatron_lm_plugin=plugin,
        gradient_accumulation_steps=accumulation,
        step_scheduler_with_optimizer=True,
        dataloader_config=DataLoaderConfiguration(split_batches=False),
        **options,
    )
    model = make()
    optimizer = make_optimizer(model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    replicas = accelerator._parts.strategy.sharding.num_shards
    each = SAMPLES // replicas // accumulation // plugin.num_micro_batches
    loader = DataLoader(make_rows(), batch_size=each)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            if accelerator.sync_gradients:
                schedule.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    losses = torch.tensor(losses).view(-1, accumulation).mean(1).tolist()
    return accelerator, model, losses


def check_equal(make, plugin, accumulation=1):
    with cuda_answered_by_cpu():
        accelerator, model, losses = train(make, plugin, accumulation)
        state = accelerator.get_state_dict(model)
    expected, weights, _ = train_plainly(make, STEPS, plugin.gradient_clipping)
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-5)
    if accelerator.is_main_process:
        torch.testing.assert_close(state, weights, rtol=1e-5, atol=1e-5)
    accelerator.free_memory()


CASES = {
    "tensor": {"tp_degree": 2, "gradient_clipping": 0.0},
    "tensor, clipped": {"tp_degree": 2, "gradient_clipping": 0.5},
    "sequence, accumulated": {"tp_degree": 2, "sequence_parallelism": True, "num_micro_batches": 2},
    "recomputed": {"tp_degree": 2, "recompute_granularity": "full"},
    "distributed optimizer": {"use_distributed_optimizer": True, "gradient_clipping": 0.5},
    "pipeline": {"pp_degree": 2, "num_micro_batches": 2, "gradient_clipping": 0.5},
    "virtual stages": {"pp_degree": 2, "num_micro_batches": 2, "num_layers_per_virtual_pipeline_stage": 1},
    "loss by token": {"calculate_per_token_loss": True, "recompute_activations": True},
}


@pytest.mark.parametrize("case", CASES)
@distributed(world_size=2)
def test_two_ranks_train_a_llama_as_one_process(case):
    check_equal(make_llama, MegatronLMPlugin(**CASES[case]))


@pytest.mark.parametrize("case", ["tensor, clipped", "pipeline"])
@distributed(world_size=2)
def test_two_ranks_train_a_gpt2_as_one_process(case):
    check_equal(make_gpt2, MegatronLMPlugin(**CASES[case]))


@pytest.mark.parametrize("case", ["sequence, accumulated", "virtual stages"])
@distributed(world_size=2)
def test_windows_of_several_calls_train_as_one_batch(case):
    check_equal(make_llama, MegatronLMPlugin(**CASES[case]), accumulation=2)


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (make_llama, {"tp_degree": 2, "pp_degree": 2, "num_micro_batches": 2}),
        (make_gpt2, {"tp_degree": 2, "use_distributed_optimizer": True, "num_micro_batches": 2}),
    ],
    ids=["tensor and pipeline", "tensor and data"],
)
@distributed(world_size=4)
def test_four_ranks_train_as_one_process(make, options):
    check_equal(make, MegatronLMPlugin(**options))
