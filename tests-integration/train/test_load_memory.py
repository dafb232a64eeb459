"""Loading a state takes little memory beyond that of the parameters and moments that it fills."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from accel_plugins.fsdp.plugin import FullyShardedDataParallelPlugin
from accel_state.accelerator_state import AcceleratorState
from accel_train import Accelerator
from harness import distributed

WIDTH, LAYERS = 1024, 16
FULL = 3 * LAYERS * 4 * WIDTH * WIDTH  # bytes of the weights and of two moments
PIECES = 48 << 20  # what a load may take: three pieces of 16 MB

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads the memory of the process from /proc")


def resident(*, restart=False):
    """Return the most bytes that were resident since the last restart."""
    if restart:
        Path("/proc/self/clear_refs").write_text("5")
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("VmHWM")).split()[1])


def make(form, *, layers=LAYERS, is_trained):
    AcceleratorState._reset_state()
    plugin = None
    if form is not None:
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            state_dict_type=form,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["Linear"],
        )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), foreach=False))
    if is_trained:
        accelerator.backward(model(torch.ones(1, WIDTH)).square().sum())
        optimizer.step()
        optimizer.zero_grad()
    return accelerator, model, optimizer


def values(optimizer):
    """The state of the optimizer and its parameters on this rank, copied."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    tensors = [
        *parameters,
        *(optimizer.state[p][key] for p in parameters for key in ("exp_avg", "exp_avg_sq")),
    ]
    local = [getattr(tensor, "to_local", lambda tensor=tensor: tensor)() for tensor in tensors]
    return [tensor.detach().clone() for tensor in local]


@pytest.mark.parametrize("form", [None, "FULL_STATE_DICT", "SHARDED_STATE_DICT"])
@distributed(world_size=2)
def test_a_load_takes_pieces_and_not_a_second_copy(form, tmp_path):
    # 1. Import what loading needs, with a small model.
    small = make(form, layers=1, is_trained=True)
    small[0].save_state(tmp_path / "small", flush=False)
    small[0].load_state(tmp_path / "small")
    small[0].free_memory()
    del small
    # 2. Save, go on, and load into what is there.
    accelerator, model, optimizer = make(form, is_trained=True)
    accelerator.save_state(tmp_path / "large", flush=False)
    saved = values(optimizer.optimizer)
    accelerator.backward(model(torch.ones(1, WIDTH)).square().sum())
    optimizer.step()
    optimizer.zero_grad()
    addresses = [value.data_ptr() for state in optimizer.state.values() for value in state.values()]
    dist.barrier()
    before = resident(restart=True)
    accelerator.load_state(tmp_path / "large")
    grown = resident() - before
    assert grown < PIECES, f"{grown / 1e6:.0f} MB of {FULL / 1e6:.0f}"
    assert all(map(torch.equal, values(optimizer.optimizer), saved))
    if form is None:
        assert addresses == [
            value.data_ptr() for state in optimizer.state.values() for value in state.values()
        ]
    accelerator.free_memory()
    del accelerator, model, optimizer, saved
    # 3. Load into a run that has not trained: the moments are allocated.
    run = make(form, is_trained=False)
    dist.barrier()
    before = resident(restart=True)
    run[0].load_state(tmp_path / "large")
    grown = resident() - before
    moments = FULL * 2 // 3 // (1 if form is None else 2)
    assert grown < moments + PIECES, f"{grown / 1e6:.0f} MB of {FULL / 1e6:.0f}"
