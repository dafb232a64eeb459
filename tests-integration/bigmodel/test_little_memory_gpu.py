"""Models larger than what a GPU has free: the plan of `device_map="auto"` holds in the forward."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from accel_bigmodel import init_empty_weights, load_checkpoint_and_dispatch
from accel_ops.weights.write import save_state_dict

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.gpu

FREE = 1 << 30  # bytes that the GPU has left
WIDTH = 2048
BLOCKS = 24  # of 128 MiB: three times as much


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.fixture
def little_memory():
    """Take the memory of the first GPU but for a little, which is then all that this process may allocate."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(0)
    taken = torch.empty(max(0, free - FREE), dtype=torch.uint8, device="cuda:0")
    torch.cuda.set_per_process_memory_fraction((taken.numel() + FREE) / total, 0)
    yield
    torch.cuda.set_per_process_memory_fraction(1.0, 0)
    del taken
    torch.cuda.empty_cache()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("checkpoint")
    save_state_dict(Model().state_dict(), folder)
    return folder


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the fraction of memory is CUDA's")
@pytest.mark.parametrize("classes", [["Block"], None])
def test_a_model_of_three_times_the_free_memory_runs(
    classes: list[str] | None, checkpoint: Path, tmp_path: Path, little_memory: None
) -> None:
    with init_empty_weights():
        empty = Model()
    model: Any = load_checkpoint_and_dispatch(
        empty,
        str(checkpoint),
        device_map="auto",
        no_split_module_classes=classes,
        offload_folder=str(tmp_path / "offload"),
    )
    assert 0 in model.hf_device_map.values()
    x = torch.randn(16, WIDTH)
    with torch.no_grad():
        found = [model(x.to(0)).cpu() for _ in range(3)]
    plain = Model()
    plain.load_state_dict(
        load_checkpoint_and_dispatch(Model(), str(checkpoint), device_map={"": "cpu"}).state_dict()
    )
    with torch.no_grad():
        expected = plain(x)
    for one in found:
        torch.testing.assert_close(one, expected, rtol=1e-3, atol=1e-3)
