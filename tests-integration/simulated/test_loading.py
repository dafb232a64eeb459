"""Weight files read onto a device: within its memory, in whatever dtype they are stored."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from accel_bigmodel import init_empty_weights, load_checkpoint_and_dispatch
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
