"""A device of a type that no table of accel lists works through `torch.accelerator`."""

from __future__ import annotations

import pickle
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_bigmodel import cpu_offload, dispatch_model, get_max_memory, infer_auto_device_map
from accel_plugins.kwargs import DataLoaderConfiguration
from accel_state import PartialState
from accel_state.device_kinds import available_kind, kind_of
from accel_state.devices import get_current_device_type
from accel_state.environ import patch_environment
from accel_state.streams import device_streams
from accel_train import Accelerator
from harness import distributed, simulated


def train(accelerator: Accelerator, state: str | None = None, steps: int = 4) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    data = TensorDataset(torch.arange(64.0).view(16, 4) / 64)
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.AdamW(model.parameters(), lr=1e-2), DataLoader(data, batch_size=2, pin_memory=True)
    )
    if state is not None:
        accelerator.load_state(state)
    losses = []
    for _, (batch,) in zip(range(steps), loader, strict=False):
        loss = model(batch).square().mean()
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@distributed(world_size=1, device="sim")
def test_it_is_chosen_and_weights_go_where_the_accelerator_computes() -> None:
    accelerator = Accelerator()
    assert accelerator.device == torch.device("sim", 0)
    assert get_current_device_type()[0] == "sim"
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    memory = get_max_memory()
    assert {0, 1} < memory.keys()
    device_map = infer_auto_device_map(model, max_memory=memory)
    dispatched = dispatch_model(model, device_map)
    assert next(dispatched.parameters()).device == accelerator.device
    kind = available_kind()
    assert kind_of(torch.device("sim")) == kind == pickle.loads(pickle.dumps(kind))
    assert kind.group_backend == "cpu:gloo,sim:simccl"


@distributed(world_size=1, device="sim")
@pytest.mark.parametrize("index", [None, 0, 1])
def test_it_is_requested_by_name(index: int | None) -> None:
    name = "sim" if index is None else f"sim:{index}"
    with patch_environment(accelerate_torch_device=name):
        assert PartialState().device == torch.device("sim", index or 0)
    PartialState._reset_state()
    with patch_environment(accelerate_use_cpu="1"):
        assert PartialState().device == torch.device("cpu")


@distributed(world_size=1, device="sim")
@pytest.mark.parametrize("mixed_precision", ["no", "bf16", "fp16"])
def test_it_trains_and_resumes_with_its_random_numbers(mixed_precision: str, tmp_path) -> None:
    options = DataLoaderConfiguration(non_blocking=True)
    accelerator = Accelerator(mixed_precision=mixed_precision, dataloader_config=options)
    train(accelerator)
    accelerator.save_state(str(tmp_path / "state"))
    right = [torch.rand(2, device="sim:0"), torch.rand(2, device="sim:1")]
    accelerator.load_state(str(tmp_path / "state"))
    found = [torch.rand(2, device="sim:0"), torch.rand(2, device="sim:1")]
    assert all(torch.equal(a, b) for a, b in zip(right, found, strict=True))
    assert accelerator.device.type == "sim"


@distributed(world_size=2, device="sim")
def test_two_ranks_train_each_on_its_own() -> None:
    accelerator = Accelerator()
    losses = train(accelerator)
    assert accelerator.device == torch.device("sim", accelerator.process_index)
    assert torch.sim.touched() == [accelerator.process_index]
    assert len(set(losses)) == len(losses) == 4
    assert accelerator.gather(
        torch.tensor([accelerator.process_index], device=accelerator.device)
    ).tolist() == [0, 1]


@distributed(world_size=1, device="sim")
def test_its_copies_overlap() -> None:
    streams = device_streams(torch.device("sim"))
    assert streams is not None
    assert streams.device == torch.device("sim", 0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8)) for _ in range(3)))
    right = model(torch.ones(1, 8))
    with torch.sim.counting() as counted:
        found = cpu_offload(model, torch.device("sim", 0))(torch.ones(1, 8, device="sim:0"))
    assert torch.equal(found.cpu(), right)
    assert counted.copies["host_to_device"] >= 3
    assert "copy" not in counted.synchronisations


PROGRAM = """\
from accel import Accelerator
accelerator = Accelerator()
state = accelerator.state
line = f"{accelerator.process_index} {state.device} {state.num_processes} {state.backend}\\n"
print(line, end="", flush=True)  # in one piece, since both ranks write
accelerator.end_training()
"""


@pytest.mark.thorough
def test_a_job_of_two_ranks_is_launched_on_it(tmp_path) -> None:
    simulated.require()
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = [sys.executable, "-m", "accel_cli", "launch", "--num_processes", "2", str(program)]
    done = subprocess.run(
        command, env=simulated.environment("sim"), capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"{rank} sim:{rank} 2 simccl" for rank in range(2)], (
        done.stdout
    )
    assert "CPU" not in done.stderr
