"""Models over two simulated devices, the host and the disk compute what they compute on the CPU."""

from __future__ import annotations

import gc
import time
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

from accel_bigmodel import (
    cpu_offload,
    disk_offload,
    dispatch_model,
    get_balanced_memory,
    infer_auto_device_map,
    init_empty_weights,
    load_checkpoint_and_dispatch,
)
from accel_state.memory import find_executable_batch_size
from accel_train import Accelerator
from harness import distributed
from harness.small_llama import make_llama

if TYPE_CHECKING:
    from pathlib import Path

TOKENS = torch.arange(12).view(2, 6) % 17
LAYERS = 6
ENDS = ("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head")
MAPS = {
    "one device": [0] * LAYERS,
    "two devices": [0, 0, 0, 1, 1, 1],
    "device and host": [0, "cpu", 0, "cpu", "cpu", 0],
    "device and disk": [0, "disk", "disk", 0, 0, "disk"],
    "everything": [0, 1, "cpu", "cpu", "disk", 1],
}


def make_model() -> nn.Module:
    # Eager attention runs the same operators on every device; "sdpa" has a fused kernel on the CPU only.
    return make_llama(num_hidden_layers=LAYERS, attn_implementation="eager").eval()


def device_map(layers: list[int | str]) -> dict[str, int | str]:
    return dict.fromkeys(ENDS, 0) | {f"model.layers.{index}": place for index, place in enumerate(layers)}


def nbytes(model: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in model.state_dict().values())


@pytest.mark.parametrize("kind", MAPS)
@distributed(world_size=1, device="npu")
def test_a_dispatched_model_computes_what_the_cpu_does_and_leaves_nothing(kind: str, tmp_path: Path) -> None:
    right = make_model()(TOKENS).logits
    model = dispatch_model(make_model(), device_map(MAPS[kind]), offload_dir=tmp_path)
    for _ in range(2):
        with torch.no_grad():
            found = model(TOKENS.to("npu:0")).logits
        assert found.device == torch.device("npu:0")
        assert torch.equal(found.cpu(), right)
    del model, found
    gc.collect()
    while any(torch.npu.memory_allocated(index) for index in range(2)):
        time.sleep(0.01)  # a thread may still hold the block that it has copied in advance


@pytest.mark.parametrize("kind", ["two devices", "everything"])
@distributed(world_size=1, device="npu")
def test_a_checkpoint_is_loaded_over_devices(kind: str, tmp_path: Path) -> None:
    model = make_model()
    right = model(TOKENS).logits
    Accelerator(cpu=True).save_model(model, str(tmp_path / "weights"), max_shard_size="20KB")
    with init_empty_weights():
        empty = make_model()
    loaded = load_checkpoint_and_dispatch(
        empty, tmp_path / "weights", device_map(MAPS[kind]), offload_folder=tmp_path / "offload"
    )
    with torch.no_grad():
        assert torch.equal(loaded(TOKENS.to("npu:0")).logits.cpu(), right)


@pytest.mark.parametrize("offload", ["cpu", "disk"])
@distributed(world_size=1, device="npu")
def test_offloaded_blocks_come_and_go_within_the_limit_of_memory(offload: str, tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(128, 128)) for _ in range(8)))
    inputs = torch.randn(4, 128)
    right = model(inputs)
    limit = nbytes(model) // 2
    with torch.npu.capacity(limit, 0):
        where = torch.device("npu", 0)
        model = cpu_offload(model, where) if offload == "cpu" else disk_offload(model, tmp_path, where)
        on_device = inputs.to(where)
        with torch.no_grad(), torch.npu.counting() as counted:
            found = model(on_device)
        assert torch.equal(found.cpu(), right)
    assert torch.npu.max_memory_allocated(0) <= limit
    assert counted.copies["host_to_device"] >= 8
    assert {*counted.synchronisations} <= {"event"}  # a pinned buffer is waited for before it is used again


@distributed(world_size=1, device="npu")
def test_a_balanced_map_fits_the_devices_and_the_rest_is_offloaded(tmp_path: Path) -> None:
    model = make_model()
    right, size = model(TOKENS).logits, nbytes(model)
    memory = {0: size // 2, 1: size // 3, "cpu": size}
    balanced = get_balanced_memory(model, memory, no_split_module_classes=["LlamaDecoderLayer"])
    found = infer_auto_device_map(model, balanced, no_split_module_classes=["LlamaDecoderLayer"])
    assert {0, 1} <= {*found.values()}
    dispatched = dispatch_model(model, found, offload_dir=tmp_path)
    assert torch.npu.memory_allocated(0) <= size // 2 + (64 << 9)  # each tensor is rounded up to 512 bytes
    with torch.no_grad():
        assert torch.equal(dispatched(TOKENS.to("npu:0")).logits.cpu(), right)


@distributed(world_size=1, device="npu")
def test_a_batch_size_that_fits_is_found() -> None:
    tried = []
    accelerator = Accelerator()

    @find_executable_batch_size(starting_batch_size=64)
    def train(batch_size: int) -> int:
        tried.append(batch_size)
        accelerator.free_memory()
        layer = nn.Linear(256, 256)
        model, optimizer = accelerator.prepare(layer, torch.optim.SGD(layer.parameters(), lr=0.1))
        accelerator.backward(model(torch.ones(batch_size, 256, device=accelerator.device)).sum())
        optimizer.step()
        return batch_size

    weights = 2 * 4 * 256 * 257
    with torch.npu.capacity(weights + 40_000, 0):
        assert train() == tried[-1] < 64
    assert tried == [64, 57, 51, 45, 40, 36]  # each nine tenths of the one before
