"""`torch.set_default_device` is the script's: what the library keeps on the host stays there."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
import torch

from accel_bigmodel import init_empty_weights, load_checkpoint_and_dispatch
from accel_ops import (
    broadcast,
    broadcast_object_list,
    copy_tensor_to_devices,
    gather,
    gather_object,
    pad_across_processes,
    reduce,
)
from accel_state.partial_state import PartialState
from accel_train import Accelerator
from harness import distributed

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def meta_by_default() -> Iterator[None]:
    """A default device whose tensors have no values, as a wrong device would show."""
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


def network() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))


@distributed(world_size=2)
def test_collectives_of_host_tensors() -> None:
    rank = PartialState(cpu=True).process_index
    rows = torch.full((2 + rank, 3), 1.0 + rank)
    numbers = torch.tensor([1 + rank])
    with meta_by_default():
        uneven = gather({"a": rows, "b": numbers})
        mean, total = reduce(numbers, "mean"), reduce({"a": numbers.float()}, "sum")
        sent = broadcast(numbers.clone())
        objects = broadcast_object_list([rank, "text"])
        listed = gather_object([rank])
        padded = pad_across_processes(rows)
        copied = copy_tensor_to_devices(numbers if rank == 1 else None)
    assert uneven["a"].tolist() == [[1.0] * 3] * 2 + [[2.0] * 3] * 3
    assert uneven["b"].tolist() == [1, 2]
    assert (mean.tolist(), total["a"].tolist()) == ([1.5], [3.0])
    assert sent.tolist() == [1]
    assert (objects, listed) == ([0, "text"], [0, 1])
    assert padded.shape == (3, 3)
    assert copied.tolist() == [2]


@distributed(world_size=2)
def test_a_state_is_saved_and_loaded(tmp_path) -> None:
    accelerator = Accelerator(cpu=True)  # torch's own planner of sharded states needs values by default
    model = network()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))

    def step() -> None:
        accelerator.backward(model(torch.ones(2, 3)).sum())
        optimizer.step()
        optimizer.zero_grad()

    step()  # torch itself makes the state of AdamW on the default device
    wanted = {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}
    with meta_by_default():
        accelerator.save_state(tmp_path / "state")
        accelerator.save_state(tmp_path / "later", blocking=False).wait()
        accelerator.save_model(model, tmp_path / "model")
    for folder in ("state", "later"):
        step()
        with meta_by_default():
            accelerator.load_state(tmp_path / folder)
        found = accelerator.get_state_dict(model)
        for name in wanted:
            torch.testing.assert_close(found[name], wanted[name], rtol=0, atol=0)


@pytest.mark.parametrize("device", ["cpu", "disk"])
def test_weights_are_read_to_the_host(device, tmp_path) -> None:
    model = network()
    Accelerator(cpu=True).save_model(model, tmp_path / "weights")
    with init_empty_weights():
        empty = network()
    inputs = torch.ones(2, 3)
    with meta_by_default():
        loaded = load_checkpoint_and_dispatch(
            empty,
            tmp_path / "weights",
            device_map={"0": "cpu", "2": device},
            offload_folder=tmp_path / "offload",
            dtype=torch.float64,
        )
        found = loaded(inputs.double())
    torch.testing.assert_close(found.float(), model(inputs))
