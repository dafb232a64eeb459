"""Megatron on a GPU, which no CPU stands for: both layer specifications, master weights, overlap."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from accel_plugins.megatron.plugin import MegatronLMPlugin
from accel_state.accelerator_state import AcceleratorState, GradientState
from accel_train import Accelerator

pytestmark = pytest.mark.gpu

TOKENS, STEPS = 128, 10


@pytest.fixture(autouse=True)
def restored_process():
    """Megatron chooses the kernels of attention by variables, NVTE_*, and makes a process group."""
    with patch.dict(os.environ):
        yield
    if dist.is_initialized():
        dist.destroy_process_group()


def make_llama():
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": TOKENS}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))


def batches(device):
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, TOKENS, (STEPS, 4, 32), generator=generator).to(device)
    return [{"input_ids": token, "labels": token} for token in tokens]


def train(model, optimizer, backward, some):
    losses = []
    for batch in some:
        loss = model(**batch).loss
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def start(precision="no", **options):
    pytest.importorskip("megatron.core")
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    plugin = MegatronLMPlugin(gradient_clipping=0.0, **options)
    accelerator = Accelerator(mixed_precision=precision, megatron_lm_plugin=plugin)
    model = make_llama()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    return accelerator, model, optimizer


def losses_of(precision="no", **options):
    accelerator, model, optimizer = start(precision, **options)
    losses = train(model, optimizer, accelerator.backward, batches(accelerator.device))
    accelerator.free_memory()
    return losses


def plain_losses():
    model = make_llama().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return train(model, optimizer, lambda loss: loss.backward(), batches("cuda"))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"attention_backend": "unfused"},
        {"num_micro_batches": 2, "recompute_granularity": "full"},
        {"use_distributed_optimizer": True, "other_megatron_args": {"overlap_grad_reduce": True}},
    ],
    ids=str,
)
def test_megatron_trains_on_a_gpu_as_pytorch_does(options):
    losses = losses_of(**{"attention_backend": "local"} | options)
    torch.testing.assert_close(losses, plain_losses(), rtol=1e-3, atol=1e-3)


def test_layers_of_transformer_engine_train_as_the_local_ones():
    pytest.importorskip("transformer_engine")
    losses = losses_of("bf16", attention_backend="auto")
    torch.testing.assert_close(losses, losses_of("bf16", attention_backend="local"), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("backend", ["auto", "local"])
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="context parallelism needs two GPUs")
def test_context_parallel_ranks_train_as_one(tmp_path, backend):
    if backend == "auto":
        pytest.importorskip("transformer_engine")
    line = ["torch.distributed.run", "--standalone", "--nproc-per-node=2", __file__, str(tmp_path / "losses")]
    subprocess.run([sys.executable, "-m", *line, backend], check=True)
    found = json.loads((tmp_path / "losses").read_text())
    expected = losses_of("bf16", attention_backend="local")
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)


def test_a_model_on_a_gpu_continues_prompts_as_transformers_does():
    accelerator, model, _ = start(attention_backend="local")
    prompts = torch.arange(1, 9, device=accelerator.device).view(2, 4)
    found = model.megatron_generate(prompts, max_new_tokens=8, eos_token_id=[])
    plain = make_llama().cuda()
    plain.generation_config.eos_token_id = None
    assert torch.equal(found, plain.generate(prompts, max_new_tokens=8, do_sample=False))
    accelerator.free_memory()


def test_a_run_on_a_gpu_goes_on_where_it_was_saved(tmp_path):
    options = {"attention_backend": "local", "attention_dropout": 0.1, "hidden_dropout": 0.1}
    accelerator, model, optimizer = start("bf16", **options)
    some = batches(accelerator.device)
    train(model, optimizer, accelerator.backward, some[:5])
    accelerator.save_state(tmp_path / "here")
    expected = train(model, optimizer, accelerator.backward, some[5:])
    accelerator.free_memory()
    accelerator, model, optimizer = start("bf16", **options)
    accelerator.load_state(tmp_path / "here")
    found = train(model, optimizer, accelerator.backward, some[5:])
    accelerator.free_memory()
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


if __name__ == "__main__":  # a rank of the test of context parallelism
    trained = losses_of("bf16", context_parallel_size=2, attention_backend=sys.argv[2])
    if torch.distributed.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(trained))
