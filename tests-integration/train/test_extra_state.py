"""Extra state of modules, as TransformerEngine has it: bytes that a fresh module does not have yet."""

from __future__ import annotations

import pickle

import pytest
import torch

from accel_plugins.fsdp.plugin import FullyShardedDataParallelPlugin
from accel_state.accelerator_state import AcceleratorState
from accel_train import Accelerator
from harness import distributed


class Scaled(torch.nn.Linear):
    """Has seen a largest value, once it has run; before, its extra state is empty."""

    largest = 0.0

    def forward(self, inputs):
        self.largest = max(self.largest, inputs.detach().abs().max().item())
        return super().forward(inputs)

    def get_extra_state(self):
        data = pickle.dumps({"largest": self.largest}) if self.largest else b""
        return (
            torch.frombuffer(bytearray(data), dtype=torch.uint8)
            if data
            else torch.empty(0, dtype=torch.uint8)
        )

    def set_extra_state(self, state):
        if state.numel():
            self.largest = pickle.loads(state.numpy().tobytes())["largest"]


def prepared(kind):
    AcceleratorState._reset_state(reset_partial_state=True)
    plugin = None
    if kind in {"sharded", "full"}:
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, state_dict_type=f"{kind}_state_dict", auto_wrap_policy="no_wrap"
        )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    torch.manual_seed(0)
    model = torch.nn.Sequential(Scaled(4, 4), torch.nn.ReLU(), Scaled(4, 4))
    return accelerator, *accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


def train(accelerator, model, optimizer):
    accelerator.backward(model(torch.full((2, 4), 3.0)).sum())
    optimizer.step()
    optimizer.zero_grad()


def values(accelerator, model):
    return [layer.largest for layer in accelerator.unwrap_model(model).modules() if isinstance(layer, Scaled)]


def check_resume(kind, folder):
    accelerator, model, optimizer = prepared(kind)
    train(accelerator, model, optimizer)
    expected = values(accelerator, model)
    assert expected[0] == 3.0
    accelerator.save_state(folder / "state")
    accelerator, model, optimizer = prepared(kind)
    assert values(accelerator, model) == [0.0, 0.0]
    accelerator.load_state(folder / "state")
    assert values(accelerator, model) == expected


def test_it_is_resumed_in_one_process(tmp_path):
    check_resume("alone", tmp_path)


@pytest.mark.parametrize("kind", ["ddp", "sharded", "full"])
@distributed(world_size=2)
def test_it_is_resumed_in_several_processes(kind, tmp_path):
    check_resume(kind, tmp_path)
