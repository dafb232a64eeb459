"""`save_model` of a model whose weights are elsewhere: on the disk, in main memory, mapped from a file."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

from accel_bigmodel import cpu_offload, disk_offload, init_empty_weights, load_checkpoint_and_dispatch
from accel_state.accelerator_state import AcceleratorState, GradientState
from accel_train import Accelerator
from accel_train.checkpoint.single_files import get_state_dict_offloaded_model

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class Net(nn.Module):
    """Two layers and a buffer; the last layer is tied to the first."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("scale", torch.tensor([2.0]))
        self.last.weight = self.first.weight
        self.scale: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.middle(self.first(x)))) * self.scale


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def offloaded(kind: str, source: Path, tmp_path: Path) -> nn.Module:
    """The model of a folder, with its weights elsewhere."""
    if kind == "mapped":
        with init_empty_weights():
            empty = Net()
        empty.tie_weights = lambda: setattr(empty.last, "weight", empty.first.weight)
        return load_checkpoint_and_dispatch(
            empty, source, device_map={"": "disk"}, offload_folder=tmp_path / "offload"
        )
    model = load_checkpoint_and_dispatch(Net(), source)
    if kind == "cpu":
        return cpu_offload(model, torch.device("cpu"))
    return disk_offload(model, tmp_path / "offload", torch.device("cpu"))


@pytest.mark.parametrize("kind", ["cpu", "disk", "mapped"])
@pytest.mark.parametrize("where", ["source", "offload", "elsewhere"])
@pytest.mark.parametrize("size", ["10GB", "300"])
def test_an_offloaded_model_is_saved_also_into_the_folder_of_its_weights(
    kind: str, where: str, size: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    original, inputs = Net(), torch.randn(2, 8)
    expected = original(inputs)
    accelerator = Accelerator(cpu=True)
    accelerator.save_model(original, tmp_path / "source", max_shard_size="10GB" if size == "300" else "300")
    model = offloaded(kind, tmp_path / "source", tmp_path)
    target = tmp_path / where
    accelerator.save_model(model, target, max_shard_size=size)
    assert torch.equal(model(inputs), expected)  # what it is mapped from is what it was
    torch.testing.assert_close(get_state_dict_offloaded_model(model), dict(original.state_dict()))
    again = load_checkpoint_and_dispatch(Net(), target)
    assert torch.equal(again(inputs), expected)
