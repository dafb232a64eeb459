"""Weight files read onto a device: within its memory, in whatever dtype they are stored."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from torch import nn

from accel_bigmodel import (
    get_balanced_memory,
    get_max_memory,
    infer_auto_device_map,
    init_empty_weights,
    load_checkpoint_and_dispatch,
)
from accel_ops.weights.write import save_state_dict
from harness import distributed

WIDTH, COUNT = 512, 8


def layers() -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(COUNT)])


@pytest.mark.parametrize("is_safe", [True, False])
@pytest.mark.parametrize(
    ("stored", "wanted"),
    [
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float64, torch.float16),
        (torch.float32, torch.float32),
    ],
)
@distributed(world_size=1, device="npu")
def test_a_load_takes_no_more_device_memory_than_its_weights(
    tmp_path: Path, is_safe: bool, stored: torch.dtype, wanted: torch.dtype
) -> None:
    torch.manual_seed(0)
    plain = layers().to(stored)
    save_state_dict(plain.state_dict(), tmp_path, max_shard_size="4MB", safe_serialization=is_safe)
    with init_empty_weights():
        empty = layers()
    half = COUNT // 2 * WIDTH * WIDTH * wanted.itemsize
    for index in range(2):
        torch.npu.reset_peak_memory_stats(index)
    # The devices hold the weights in their final dtype to the last byte.
    with torch.npu.capacity(half, half):
        device_map = {str(index): index // (COUNT // 2) for index in range(COUNT)}
        model = load_checkpoint_and_dispatch(empty, tmp_path, device_map, dtype=wanted)
    assert [torch.npu.max_memory_allocated(index) for index in range(2)] == [half, half]
    for name, weight in model.state_dict().items():
        assert torch.equal(weight.cpu(), plain.state_dict()[name].to(wanted))


def count_on(device_map: dict[str, int | str], device: int | str) -> int:
    names = [str(index) for index in range(COUNT)]
    return [device_map.get(name, device_map.get("")) for name in names].count(device)


@distributed(world_size=1, device="npu")
def test_the_first_device_keeps_a_tenth_of_its_free_memory() -> None:
    model = layers().to("meta")
    layer = WIDTH * WIDTH * 4
    get_max_memory()  # loads what the device needs for products of matrices
    with torch.npu.capacity(torch.npu.memory_reserved(0) + COUNT * layer, 1):
        free = get_max_memory()
        assert COUNT * layer * 0.99 < free[0] <= COUNT * layer
        # All layers would fit to the last byte; 90 % are room for 7, less two blocks on their way, for which
        # the allocator takes 2 MiB each.
        for limits in (None, get_balanced_memory(model)):
            assert count_on(infer_auto_device_map(model, limits), 0) == 3
        assert count_on(infer_auto_device_map(model, {0: COUNT * layer, "cpu": free["cpu"]}), 0) == COUNT
    with torch.npu.capacity(torch.npu.memory_reserved(0) + (COUNT + 1) * layer, 1):
        assert count_on(infer_auto_device_map(model, get_balanced_memory(model)), 0) == COUNT


@distributed(world_size=1, device="npu")
def test_a_device_that_cannot_be_used_gets_no_layers() -> None:
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("accel_bigmodel").addHandler(handler)
    with torch.npu.capacity(0, 1 << 30):  # another program has taken all of its memory
        memory = get_max_memory()
        device_map = infer_auto_device_map(layers().to("meta"), memory)
    assert memory.keys() == {1, "cpu"}
    assert count_on(device_map, 1) == COUNT
    assert "Device 0 cannot be used, and gets no layers: NPU out of memory" in messages[0]
    logging.getLogger("accel_bigmodel").removeHandler(handler)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


@pytest.mark.parametrize("classes", [["Block"], None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@distributed(world_size=1, device="npu")
def test_a_model_of_three_times_the_free_memory_runs(
    tmp_path: Path, classes: list[str] | None, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(*[Block() for _ in range(12)])
    save_state_dict(plain.state_dict(), tmp_path)
    with init_empty_weights():
        empty = nn.Sequential(*[Block() for _ in range(12)])
    size = sum(parameter.numel() for parameter in plain.parameters()) * dtype.itemsize
    x = torch.randn(4, WIDTH)
    with torch.npu.capacity(size // 3, 1), torch.no_grad():
        model = load_checkpoint_and_dispatch(empty, tmp_path, "auto", None, classes, dtype=dtype)
        assert {0, "cpu"} <= {*model.hf_device_map.values()}
        for _ in range(3):
            assert torch.equal(model(x.to(0, dtype)).cpu(), plain.to(dtype)(x.to(dtype)))
