"""Models that a device map spreads over two accelerators, the host and the disk."""

from __future__ import annotations

import contextlib
import gc
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from accel_bigmodel import cpu_offload, disk_offload, dispatch_model
from accel_bigmodel.pipeline import prepare_pippy
from accel_plugins.kwargs import TorchDynamoPlugin
from accel_state.partial_state import PartialState
from accel_train import Accelerator
from accel_train.checkpoint.single_files import get_state_dict_offloaded_model
from harness import distributed, simulated

if TYPE_CHECKING:
    from pathlib import Path

MAPS: dict[str, dict[str, Any]] = {
    "two devices": {"0": 0, "1": 1, "2": 1},
    "device and host": {"0": 0, "1": "cpu", "2": 0},
    "device and disk": {"0": 0, "1": "disk", "2": 0},
    "two devices and host": {"0": 0, "1": "cpu", "2": 1},
}


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(64, 64) for _ in range(3)])


@pytest.mark.parametrize("name", MAPS)
@distributed(world_size=1, device="npu")
def test_a_spread_model_is_prepared_where_it_is(name: str, tmp_path: Path) -> None:
    x = torch.ones(1, 64)
    expected = layers()(x)
    for how in ("prepare", "prepare_model", "evaluated", "not placed", "compiled"):
        accelerator = Accelerator(
            dynamo_plugin=TorchDynamoPlugin(backend="eager") if how == "compiled" else None
        )
        model = dispatch_model(layers(), MAPS[name], offload_dir=tmp_path)
        devices = [parameter.device for parameter in model.parameters()]
        prepared: Any = (
            accelerator.prepare_model(model, evaluation_mode=how == "evaluated")
            if how in ("prepare_model", "evaluated")
            else accelerator.prepare(model, device_placement=[False] if how == "not placed" else None)
        )
        assert [parameter.device for parameter in model.parameters()] == devices
        with torch.no_grad():
            for _ in range(2):
                torch.testing.assert_close(prepared(x).cpu(), expected)
        state = get_state_dict_offloaded_model(model)
        assert {value.device.type for value in state.values()} == {"cpu"}
        torch.testing.assert_close(state, dict(layers().state_dict()))
        accelerator.free_memory()


@pytest.mark.parametrize("name", MAPS)
@distributed(world_size=1, device="npu")
def test_a_part_that_is_called_on_its_own_moves_its_inputs(name: str, tmp_path: Path) -> None:
    plain, model = layers(), dispatch_model(layers(), MAPS[name], offload_dir=tmp_path)
    for index, part in enumerate(model):
        for device in ("cpu", "npu:0", "npu:1"):
            x = torch.randn(2, 64)
            torch.testing.assert_close(part(x.to(device)).cpu(), plain[index](x))


@distributed(world_size=1, device="npu")
def test_offloading_from_a_device_frees_its_memory() -> None:
    npu: Any = torch.npu  # pyright: ignore[reportAttributeAccessIssue] - the simulated device
    model = layers().to("npu:0")
    before = npu.memory_allocated(0)
    model = dispatch_model(model, {"0": 0, "1": "cpu", "2": "cpu"})
    assert npu.memory_allocated(0) <= before / 3
    model(torch.ones(1, 64))


class Tied(nn.Module):
    """A large embedding that is tied to the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.middle = nn.Embedding(4096, 16), nn.Linear(16, 16)
        self.head = nn.Linear(16, 4096, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.middle(self.embed(tokens)))


@distributed(world_size=1, device="npu")
def test_a_weight_is_not_copied_whose_tied_one_is_on_the_device() -> None:
    npu: Any = torch.npu  # pyright: ignore[reportAttributeAccessIssue] - the simulated device
    model, tokens = Tied(), torch.arange(4)
    expected = model(tokens)
    model = dispatch_model(model, {"embed": "cpu", "middle": "cpu", "head": 0})
    torch.testing.assert_close(model(tokens).cpu(), expected)
    before = npu.memory_allocated(0)
    npu.reset_peak_memory_stats(0)
    with npu.counting() as counted:
        model(tokens)
    assert counted.copies["host_to_device"] == 2  # the tokens, and the block in the middle
    assert npu.max_memory_allocated(0) - before < 4096 * 16 * 4


@pytest.mark.parametrize("offload", ["cpu", "disk"])
@distributed(world_size=1, device="npu")
def test_tied_weights_that_are_offloaded_are_copied_once_in_a_forward(offload: str, tmp_path: Path) -> None:
    npu: Any = torch.npu  # pyright: ignore[reportAttributeAccessIssue] - the simulated device
    model, tokens = Tied(), torch.arange(4)
    model.middle = nn.Sequential(model.middle)
    expected = model(tokens)
    model = cpu_offload(model, "npu:0") if offload == "cpu" else disk_offload(model, tmp_path, "npu:0")
    before = npu.memory_allocated(0)
    for _ in range(2):
        with torch.no_grad(), npu.counting() as counted:
            torch.testing.assert_close(model(tokens).cpu(), expected)
        # The tokens, the embedding, the middle: from the disk in two copies.
        assert counted.copies["host_to_device"] == (3 if offload == "cpu" else 4)
        assert npu.memory_allocated(0) == before


@distributed(world_size=1, device="npu")
def test_a_tied_weight_is_copied_again_where_memory_is_short() -> None:
    npu: Any = torch.npu  # pyright: ignore[reportAttributeAccessIssue] - the simulated device
    model, tokens = Tied(), torch.arange(4)
    model.middle = nn.Sequential(nn.Linear(16, 4096), nn.Linear(4096, 16))  # as large as the embedding
    expected = model(tokens)
    model = cpu_offload(model, "npu:0")
    with torch.no_grad(), npu.capacity(4096 * 16 * 4 * 3 // 2), npu.counting() as counted:
        torch.testing.assert_close(model(tokens).cpu(), expected)
    assert counted.copies["host_to_device"] == 5  # tokens, the embedding twice, and two layers


class Twice(nn.Module):
    """One parameter under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64))
        self.same = self.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight + x @ self.same


@pytest.mark.parametrize("offload", ["cpu", "disk"])
@distributed(world_size=1, device="npu")
def test_a_parameter_that_is_twice_in_a_module_is_copied_once(offload: str, tmp_path: Path) -> None:
    npu: Any = torch.npu  # pyright: ignore[reportAttributeAccessIssue] - the simulated device
    model, x = Twice(), torch.randn(2, 64)
    expected = model(x)
    model = cpu_offload(model, "npu:0") if offload == "cpu" else disk_offload(model, tmp_path, "npu:0")
    before = npu.memory_allocated(0)
    npu.reset_peak_memory_stats(0)
    with torch.no_grad(), npu.counting() as counted:
        torch.testing.assert_close(model(x).cpu(), expected)
    assert counted.copies["host_to_device"] == 2  # the input, and the weight
    assert npu.max_memory_allocated(0) - before < 2 * 64 * 64 * 4


@distributed(world_size=1, device="npu")
def test_a_parameter_that_the_program_assigns_runs_on_the_device() -> None:
    plain, model, x = layers(), cpu_offload(layers(), torch.device("npu:0")), torch.randn(2, 64)
    model(x)
    weight = torch.randn(64, 64)
    plain[1].weight, model[1].weight = nn.Parameter(weight), nn.Parameter(weight.clone())
    for _ in range(2):
        torch.testing.assert_close(model(x).cpu(), plain(x))


class Failing(nn.Linear):
    """Fails in the middle of a model where that is asked."""

    fails = False

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - the name of torch
        if self.fails:
            raise KeyError
        return super().forward(input)


@pytest.mark.parametrize("offload", ["cpu", "disk", "map"])
@pytest.mark.parametrize("fails", [False, True])
@distributed(world_size=1, device="npu")
def test_no_block_stays_on_the_device_between_forwards(offload: str, fails: bool, tmp_path: Path) -> None:
    """Nothing says that another forward follows: a model that waits holds no memory for one."""

    npu: Any = torch.npu  # pyright: ignore[reportAttributeAccessIssue] - the simulated device
    parts = [Failing(64, 64) for _ in range(5)]
    parts[2].fails = fails
    model = nn.Sequential(*parts).eval()
    del parts
    x = torch.ones(1, 64)
    if offload == "cpu":
        cpu_offload(model, "npu:0")
    elif offload == "disk":
        disk_offload(model, tmp_path, "npu:0")
    else:
        dispatch_model(
            model, {"0": 0, "1": "cpu", "2": "cpu", "3": "disk", "4": "disk"}, offload_dir=tmp_path
        )
    before = npu.memory_allocated(0)
    with torch.no_grad():
        for _ in range(4):
            with contextlib.suppress(KeyError):
                model(x)
            assert npu.memory_allocated(0) == before
    del model
    gc.collect()
    assert npu.memory_allocated(0) == 0


@distributed(world_size=2, device="npu")
def test_a_pipeline_is_traced_with_examples_on_another_device_than_the_model() -> None:
    plain, x = layers().eval(), torch.randn(4, 64)
    device = PartialState().device
    model = prepare_pippy(layers().eval(), example_args=(x.to(device),), gather_output=True)
    torch.testing.assert_close(model(x.to(device)).cpu(), plain(x))


ON_SECOND = """\
import sys
import torch
from safetensors.torch import save_file
from accel_bigmodel.offload import OffloadedWeightsLoader
from accel_bigmodel.offloaded_block import StreamedBlocks
from accel_bigmodel.sources import SafetensorsSource

device = torch.device("npu", 1)
torch.npu.set_device(device)  # as a rank does
weights = {f"{number}.w": torch.full((64,), float(number)) for number in range(3)}
save_file(weights, "m.safetensors")
on_disk = {name: {"safetensors_file": "m.safetensors", "dtype": "float32"} for name in weights}
for loader in (OffloadedWeightsLoader(state_dict=weights), OffloadedWeightsLoader(index=on_disk)):
    blocks = StreamedBlocks(loader, {name[0]: [name] for name in weights}, device)
    for number in range(3):
        assert (blocks.acquire(str(number))[f"{number}.w"] + 0).tolist() == [number] * 64
        blocks.release(str(number))
source = SafetensorsSource("m.safetensors")
for name, value in source.upload(dict.fromkeys(weights, torch.float32), device).items():
    assert torch.equal(value.cpu(), weights[name])
print(torch.npu.touched())
"""


def test_threads_make_no_context_on_another_device(tmp_path: Path) -> None:
    simulated.require()
    done = subprocess.run(
        [sys.executable, "-c", ON_SECOND],
        env=simulated.environment("npu"),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split("\n") == ["[1]", ""], done.stderr
