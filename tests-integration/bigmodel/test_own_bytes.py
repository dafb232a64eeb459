"""Models without values on all ranks are sharded, and each rank then reads its own bytes of the files."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from accel_bigmodel import init_empty_weights, load_checkpoint_in_model
from accel_plugins.fsdp.plugin import FullyShardedDataParallelPlugin
from accel_plugins.parallelism.config import ParallelismConfig
from accel_state.accelerator_state import AcceleratorState
from accel_state.errors import SettingsError
from accel_train import Accelerator
from harness import cases, distributed

SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 512,
}
EXPERTS: dict[str, Any] = {"num_experts": 8, "num_local_experts": 8, "moe_intermediate_size": 96}
TOKENS = torch.arange(24).view(2, 12)


def llama() -> Any:
    return LlamaForCausalLM(LlamaConfig(**SIZES))


def qwen() -> Any:
    """Names of the Hub: one tensor for each expert and projection; in memory two for all of them."""
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES | EXPERTS))


def mixtral() -> Any:
    return MixtralForCausalLM(MixtralConfig(**SIZES | EXPERTS))


def make_accelerator(model: Any, **axes: int) -> Accelerator:
    AcceleratorState._reset_state(reset_partial_state=False)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=[type(model.model.layers[0]).__name__],
    )
    return Accelerator(
        cpu=True,
        fsdp_plugin=plugin if "dp_shard_size" in axes else None,
        parallelism_config=ParallelismConfig(**axes),
    )


def bytes_read() -> int:
    """The bytes that this process has asked the system for, by any way of reading a file."""
    rows = Path("/proc/self/io").read_text().splitlines()
    return next(int(row.split()[1]) for row in rows if row.startswith("rchar"))


def own_bytes(model: nn.Module) -> int:
    """The bytes of this rank's shards, and of tensors that every rank has."""
    tensors = [getattr(value, "_local_tensor", value) for value in model.state_dict().values()]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def save(model: Any, folder: Path, accelerator: Accelerator) -> None:
    if accelerator.is_main_process:
        model.save_pretrained(folder, max_shard_size="4MB")
    accelerator.wait_for_everyone()


def empty(make: Any) -> Any:
    with init_empty_weights():
        return make().train()


@pytest.fixture(autouse=True)
def _only_linux() -> None:
    if not Path("/proc/self/io").exists():
        pytest.skip("the system does not count what a process reads")


def check(tmp_path: Path, make: Any, **axes: int) -> None:
    warnings.filterwarnings("ignore", message=".*returned a view tensor")
    torch.manual_seed(0)
    full = make()
    accelerator = make_accelerator(full, **axes)
    save(full, tmp_path, accelerator)
    expected = {name: tensor.clone() for name, tensor in full.state_dict().items()}
    # 1. Both trained models are the same: one whose weights were there, and one that is loaded later.
    outputs = []
    for is_empty in (False, True):
        model = empty(make) if is_empty else copy.deepcopy(full)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = accelerator.prepare(model, optimizer)
        if is_empty:
            load_checkpoint_in_model(model, tmp_path, strict=True)  # imports what it needs
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()
            read: list[int] = []
            for _ in range(3):
                before = bytes_read()
                load_checkpoint_in_model(model, tmp_path, strict=True)
                read.append(bytes_read() - before)
            # Whatever else the process reads meanwhile, such as sources for a warning, adds to it.
            assert min(read) <= 1.05 * own_bytes(model), (read, own_bytes(model))
        state = accelerator.get_state_dict(model)
        if accelerator.is_main_process:
            assert state.keys() == expected.keys()
            assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())
        loss = model(input_ids=TOKENS, labels=TOKENS).loss
        accelerator.backward(loss)
        optimizer.step()
        outputs.append((loss.detach(), {n: p.detach() for n, p in model.named_parameters()}))
    (loss, trained), (other_loss, other) = outputs
    assert torch.equal(loss, other_loss)
    for name, value in trained.items():
        one, two = (getattr(tensor, "_local_tensor", tensor) for tensor in (value, other[name]))
        assert torch.equal(one, two), name


CASES = {
    "fsdp": (llama, {"dp_shard_size": 2}),
    "tp": (llama, {"tp_size": 2}),
    "fsdp, converted": (qwen, {"dp_shard_size": 2}),
    "ep, converted": (qwen, {"dp_shard_size": 2, "ep_size": 2}),
    "tp, converted": (mixtral, {"tp_size": 2}),
}
OF_FOUR = {
    "fsdp": (llama, {"dp_shard_size": 4}),
    "tp and fsdp": (llama, {"dp_shard_size": 2, "tp_size": 2}),
    "fsdp, converted": (mixtral, {"dp_shard_size": 4}),
    "ep, converted": (qwen, {"dp_shard_size": 4, "ep_size": 2}),
    "tp and fsdp, converted": (qwen, {"dp_shard_size": 2, "tp_size": 2}),
}


@pytest.mark.parametrize("case", cases(CASES, always={"fsdp", "ep, converted", "tp, converted"}))
@distributed(world_size=2)
def test_a_rank_of_two_reads_its_own_bytes(tmp_path: Path, case: str) -> None:
    make, axes = CASES[case]
    check(tmp_path, make, **axes)


@pytest.mark.parametrize("case", cases(OF_FOUR, always={"tp and fsdp"}))
@distributed(world_size=4)
def test_a_rank_of_four_reads_its_own_bytes(tmp_path: Path, case: str) -> None:
    make, axes = OF_FOUR[case]
    check(tmp_path, make, **axes)


def memory(row: str) -> int:
    """Bytes of memory that this process has (`VmRSS`), or had at most (`VmHWM`)."""
    rows = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in rows if line.startswith(row))


@pytest.mark.thorough
@distributed(world_size=2)
def test_a_load_holds_a_part_of_one_tensor_beside_the_shards(tmp_path: Path) -> None:
    wide = SIZES | EXPERTS | {"hidden_size": 1024, "moe_intermediate_size": 768, "vocab_size": 4096}
    full = Qwen3MoeForCausalLM(Qwen3MoeConfig(**wide))
    accelerator = make_accelerator(full, dp_shard_size=2)
    save(full, tmp_path, accelerator)
    model = accelerator.prepare(empty(lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**wide))))
    load_checkpoint_in_model(model, tmp_path, strict=True)
    Path("/proc/self/clear_refs").write_text("5")  # the highest mark begins here
    before = memory("VmRSS")
    load_checkpoint_in_model(model, tmp_path, strict=True)
    largest = max(parameter.numel() for parameter in model.parameters()) * 4 // 2
    # Experts are read, stacked and concatenated.
    assert memory("VmHWM") - before <= 3 * largest + 2**23


class Rotating(nn.Module):
    """A linear layer, and a buffer that no checkpoint has."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("frequencies", torch.ones(4), persistent=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.linear(inputs * self.frequencies)


@distributed(world_size=2)
def test_a_weight_that_was_not_loaded_shows_and_lost_buffers_are_refused() -> None:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    with init_empty_weights():
        model = Rotating()
    model = accelerator.prepare(model)
    assert model(torch.ones(1, 4)).isnan().all()
    with torch.device("meta"):
        model = Rotating()
    with pytest.raises(SettingsError, match=r"frequencies are buffers on the meta device that no"):
        accelerator.prepare(model)
