"""`prepare` of models that a device map spreads: they stay in place, run, train adapters and are saved."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from accel_bigmodel import cpu_offload, disk_offload, dispatch_model
from accel_state.accelerator_state import AcceleratorState, GradientState
from accel_state.errors import CheckpointError, UnsupportedError
from accel_train import Accelerator
from harness import distributed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

CPU = torch.device("cpu")
OFFLOADS: dict[str, Callable[[Any, Path], nn.Module]] = {
    "some on the disk": lambda model, folder: dispatch_model(
        model, {"0": "cpu", "1": "disk", "2": "cpu"}, offload_dir=folder
    ),
    "all on the disk": lambda model, folder: dispatch_model(model, {"": "disk"}, offload_dir=folder),
    "cpu_offload": lambda model, folder: cpu_offload(model, CPU),
    "disk_offload": lambda model, folder: disk_offload(model, folder, CPU),
}
PREPARES: dict[str, Callable[[Accelerator, nn.Module], nn.Module]] = {
    "prepare": lambda accelerator, model: accelerator.prepare(model),
    "prepare, not placed": lambda accelerator, model: accelerator.prepare(model, device_placement=[False]),
    "prepare_model": lambda accelerator, model: accelerator.prepare_model(model),
    "to evaluate": lambda accelerator, model: accelerator.prepare_model(model, evaluation_mode=True),
}


class Adapted(nn.Module):
    """A base with a low-rank adapter beside it."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base
        self.down, self.up = nn.Linear(4, 2, bias=False), nn.Linear(2, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def layers(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)])


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.mark.parametrize("how", PREPARES)
@pytest.mark.parametrize("kind", OFFLOADS)
def test_an_offloaded_model_is_prepared_and_computes_the_same(kind: str, how: str, tmp_path: Path) -> None:
    x = torch.randn(2, 4)
    expected = layers()(x)
    model = OFFLOADS[kind](layers(), tmp_path)
    before = dict(model.named_parameters())
    prepared = PREPARES[how](Accelerator(cpu=True), model)
    assert all(before[name] is parameter for name, parameter in prepared.named_parameters())
    torch.testing.assert_close(prepared(x), expected)


@pytest.mark.parametrize("kind", OFFLOADS)
def test_an_adapter_on_an_offloaded_base_trains_and_resumes_as_on_a_plain_one(
    kind: str, tmp_path: Path
) -> None:
    plain = Adapted(layers().requires_grad_(False))
    spread = copy.deepcopy(plain)
    spread.base = OFFLOADS[kind](spread.base, tmp_path / "offload")
    losses = [losses_of(model, tmp_path / name) for name, model in (("a", plain), ("b", spread))]
    torch.testing.assert_close(losses[1], losses[0])


def losses_of(model: nn.Module, folder: Path) -> tuple[float, float]:
    """Train three steps, of which the second is repeated from a checkpoint."""
    accelerator = Accelerator(cpu=True)
    x = torch.ones(2, 4)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    prepared, optimizer = accelerator.prepare(model, optimizer)

    def step() -> float:
        loss = prepared(x).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    step()
    accelerator.save_state(folder)
    second = step()
    accelerator.load_state(folder)
    assert step() == second
    return second, step()


@pytest.mark.parametrize("kind", OFFLOADS)
def test_the_state_of_an_offloaded_model_is_that_of_the_plain_one(kind: str, tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(OFFLOADS[kind](layers(), tmp_path / "offload"))
    accelerator.save_state(tmp_path / "state")
    accelerator.load_state(tmp_path / "state")
    accelerator.free_memory()
    plain = accelerator.prepare(layers(1))
    accelerator.load_state(tmp_path / "state")
    torch.testing.assert_close(plain.state_dict(), layers().state_dict())


@pytest.mark.parametrize("kind", OFFLOADS)
def test_a_state_with_other_values_is_not_loaded_in_silence(kind: str, tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(layers(1))
    accelerator.save_state(tmp_path / "state")
    accelerator.free_memory()
    accelerator.prepare(OFFLOADS[kind](layers(), tmp_path / "offload"))
    with pytest.raises(CheckpointError, match=r"weight' of Sequential is offloaded, and .* other values"):
        accelerator.load_state(tmp_path / "state")


@distributed(world_size=2)
def test_several_ranks_evaluate_an_offloaded_model_and_do_not_train_it() -> None:
    accelerator = Accelerator(cpu=True)
    x = torch.ones(2, 4)
    model = cpu_offload(layers(), CPU)
    prepared = accelerator.prepare_model(model, evaluation_mode=True)
    torch.testing.assert_close(prepared(x), layers()(x))
    with pytest.raises(UnsupportedError, match="spread over several devices, the host or the disk"):
        accelerator.prepare(cpu_offload(layers(), CPU))
