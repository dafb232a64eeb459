"""A third party's model family for Megatron: its models train, and their weights come back."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from transformers import Qwen2Config, Qwen2ForCausalLM

from accel_plugins.megatron.families import find_family
from accel_plugins.megatron.plugin import MegatronLMPlugin, check_model
from accel_state.errors import SettingsError, UnsupportedError
from accel_train import Accelerator
from extending.installed import install, installed
from harness import distributed
from harness.cuda_names import cuda_answered_by_cpu

TOKENS, LENGTH, STEPS, SAMPLES = 32, 8, 20, 4


def make_model(**options):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": TOKENS}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = Qwen2ForCausalLM(Qwen2Config(**sizes, **heads, **options))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):  # transformers begins with zeros
                parameter.normal_()
    return model


def make_rows():
    rows = torch.randint(0, TOKENS, (STEPS * SAMPLES, LENGTH), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in rows]


def train_plainly():
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    losses = []
    for batch in DataLoader(make_rows(), batch_size=SAMPLES):
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, dict(model.state_dict())


@pytest.mark.parametrize("sizes", [{"tp_degree": 2}, {"pp_degree": 2, "num_micro_batches": 2}], ids=str)
@distributed(world_size=2)
def test_two_ranks_train_a_model_of_an_installed_family_as_one_process(sizes, tmp_path):
    with installed(install(tmp_path / str(dist.get_rank()))), cuda_answered_by_cpu():
        plugin = MegatronLMPlugin(**sizes)
        accelerator = Accelerator(cpu=True, megatron_lm_plugin=plugin)
        model = make_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
        loader = DataLoader(make_rows(), batch_size=SAMPLES // plugin.num_micro_batches)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        losses = []
        for batch in loader:
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        state = accelerator.get_state_dict(model)
        accelerator.free_memory()
    expected, weights = train_plainly()
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-5)
    if dist.get_rank() == 0:
        torch.testing.assert_close(state, weights, rtol=1e-5, atol=1e-5)


def test_an_installed_family_is_found_counted_and_named(tmp_path):
    with installed(install(tmp_path)):
        model = make_model()
        assert find_family(model).architectures == ("Qwen2ForCausalLM",)
        with pytest.raises(SettingsError, match=r"'unknown' cannot be trained.*'qwen2', 'bert', 'gpt2'"):
            find_family("unknown")
        with pytest.raises(UnsupportedError, match="use_sliding_window=True"):
            check_model(MegatronLMPlugin(), make_model(use_sliding_window=True))
    with pytest.raises(SettingsError, match=r"'qwen2' cannot be trained .* ModelFamily"):
        find_family(make_model())
