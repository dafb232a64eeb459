"""Replica groups that train apart, and average after some steps: torchft's LocalSGD and DiLoCo."""

from __future__ import annotations

import copy
import os
import re
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from accel_plugins import ReplicaSyncKwargs
from accel_plugins.precision import build_precision
from accel_plugins.strategy import Bundle
from accel_plugins.torchft import strategy as replica_groups
from accel_state.errors import SettingsError, UnsupportedError
from accel_state.libraries import is_installed
from accel_state.partial_state import PartialState
from accel_state.runtime import Runtime
from accel_state.settings.model import Settings
from accel_state.settings.run import ReplicaSettings
from harness import distributed

pytestmark = pytest.mark.skipif(not is_installed("torchft"), reason="needs torchft")

EVERY, WINDOWS = 3, 2


def outer(parameters):
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)


def make_model(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def batch_of(step, group):
    generator = torch.Generator().manual_seed(10 * step + group)
    return torch.randn(5, 3, generator=generator, dtype=torch.float64)


def train(kind):
    """Train two groups in one process, with plain PyTorch; yield the parameters after each window."""
    models = [make_model(0), make_model(0)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.05) for model in models]
    shared = make_model(0)
    stepping = outer(shared.parameters())
    for window in range(WINDOWS):
        for step in range(window * EVERY, (window + 1) * EVERY):
            for group, model in enumerate(models):
                optimizers[group].zero_grad()
                model(batch_of(step, group)).square().mean().backward()
                optimizers[group].step()
        for parameter, *own in zip(shared.parameters(), *(m.parameters() for m in models), strict=True):
            mean = sum(own) / 2
            parameter.grad = (parameter - mean).detach()
            if kind == "local_sgd":
                parameter.data.copy_(mean)
        if kind == "diloco":
            stepping.step()
        for model in models:
            model.load_state_dict(shared.state_dict())
        yield [parameter.detach().clone() for parameter in shared.parameters()]


@pytest.mark.parametrize("kind", ["local_sgd", "diloco"])
@distributed(world_size=2)
def test_two_groups_have_the_same_parameters_after_each_sync(kind):
    from torchft.coordination import LighthouseServer

    # torch says so where torchft receives a state, and torchft takes any exception for a failure.
    warnings.filterwarnings("ignore", message="The given buffer is not writable")
    runtime, address, lighthouse = PartialState(cpu=True).runtime, [None], None
    group = runtime.topology.rank
    if group == 0:
        lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=2, quorum_tick_ms=5)
        address = [f"http://127.0.0.1:{lighthouse.address().rpartition(':')[2]}"]
    runtime.collectives.broadcast_object_list(address, 0)
    own = ReplicaSettings(groups=2, group=group, min_groups=2, lighthouse=address[0])
    options = ReplicaSyncKwargs(sync_every=EVERY, outer_optimizer=outer if kind == "diloco" else None)
    strategy = replica_groups.ReplicaStrategy(
        replace(Settings(), replicas=own),
        Runtime(),  # each group is one process
        build_precision("no", torch.device("cpu")),
        {ReplicaSyncKwargs: options},
    )
    try:
        model = make_model(group)  # the first group's weights are those of all
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        bundle = strategy.wrap(Bundle(models=[model], optimizers=[optimizer]))
        expected = train(kind)
        for step in range(EVERY * WINDOWS):
            loss = bundle.models[0](batch_of(step, group)).square().mean()
            strategy.backward(loss, accumulation=1, sync=True)
            strategy.step(optimizer)
            optimizer.zero_grad()
            alike = runtime.collectives.all_gather_object([p.detach() for p in model.parameters()])
            is_equal = all(torch.equal(a, b) for a, b in zip(*alike, strict=True))
            assert is_equal == ((step + 1) % EVERY == 0), "apart within a window"
            if is_equal:
                for parameter, right in zip(model.parameters(), next(expected), strict=True):
                    torch.testing.assert_close(parameter.detach(), right, rtol=0, atol=1e-12)
    finally:
        strategy.release()
        runtime.collectives.barrier()
        if lighthouse is not None:
            lighthouse.shutdown()


def test_shards_have_no_diloco_and_the_number_of_steps_is_checked():
    with pytest.raises(SettingsError, match="expected a whole number of at least 1"):
        ReplicaSyncKwargs(sync_every=0)
    with pytest.raises(UnsupportedError, match="torchft's DiLoCo cannot send"):
        replica_groups.ShardedReplicaStrategy(
            Settings(),
            Runtime(),
            build_precision("no", torch.device("cpu")),
            {ReplicaSyncKwargs: ReplicaSyncKwargs(outer_optimizer=outer)},
        )


SCRIPT = """\
import os, signal, sys, time
import torch
from accel import Accelerator
from accel_plugins import ReplicaSyncKwargs

folder, kind = sys.argv[1:]
group, life = int(os.environ["REPLICA_GROUP_ID"]), int(os.environ["ACCELERATE_REPLICA_RESTARTS"])
outer = lambda parameters: torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)
options = ReplicaSyncKwargs(sync_every=4, outer_optimizer=outer if kind == "diloco" else None)
accelerator = Accelerator(cpu=True, step_scheduler_per="update", kwargs_handlers=[options])
torch.manual_seed(group)
x = torch.randn(320, 4, generator=torch.Generator().manual_seed(0))
data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True).sin())
model = torch.nn.Sequential(torch.nn.Linear(4, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 20, gamma=0.9)
loader = torch.utils.data.DataLoader(data, batch_size=4)
model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
groups = accelerator._parts.strategy.replicas
open(f"{folder}/ready.{group}.{life}", "w").close()
steps = 0
while loader.iteration < 2:
    for inputs, targets in loader:
        accelerator.backward(torch.nn.functional.mse_loss(model(inputs), targets))
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        steps += 1
        if (group, life, steps) == (1, 0, 18):
            os.kill(os.getpid(), signal.SIGKILL)
        while group == 0 and steps == 24 and not os.path.exists(f"{folder}/ready.1.1"):
            time.sleep(0.1)
torch.save(
    {
        "weights": [parameter.detach() for parameter in model.parameters()],
        "rate": schedule.get_last_lr(),
        "syncs": groups.manager.current_step(),
    },
    f"{folder}/end.{group}",
)
"""


def train_disturbed(kind: str, back: int) -> list[torch.Tensor]:
    """Train as the script in one process, without the second group from step 16 to step `back`."""
    x = torch.randn(320, 4, generator=torch.Generator().manual_seed(0))
    targets = x.sum(1, keepdim=True).sin()
    torch.manual_seed(0)
    shared = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1))
    models = [copy.deepcopy(shared), copy.deepcopy(shared)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.02) for model in models]
    schedules = [torch.optim.lr_scheduler.StepLR(optimizer, 20, gamma=0.9) for optimizer in optimizers]
    stepping = outer(shared.parameters())
    for step in range(80):
        alone = 16 <= step < back
        for group in (0,) if alone else (0, 1):
            rows = slice(8 * (step % 40) + 4 * group, 8 * (step % 40) + 4 * group + 4)
            optimizers[group].zero_grad()
            nn.functional.mse_loss(models[group](x[rows]), targets[rows]).backward()
            optimizers[group].step()
            schedules[group].step()
        if step % 4 != 3:
            continue
        if alone:
            models[1].load_state_dict(models[0].state_dict())
            optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
            schedules[1].load_state_dict(schedules[0].state_dict())
        for parameter, *own in zip(shared.parameters(), *(m.parameters() for m in models), strict=True):
            mean = (sum(own) / 2).detach()
            parameter.grad = parameter.detach() - mean
            if kind == "local_sgd":
                parameter.data.copy_(mean)
        if kind == "diloco":
            stepping.step()
        for model in models:
            model.load_state_dict(shared.state_dict())
    return [parameter.detach() for parameter in shared.parameters()]


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["local_sgd", "diloco"])
def test_a_group_that_is_killed_is_healed_in_the_next_sync(kind: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    options = ("--cpu", "--replica_groups", "2", "--replica_timeout", "2")
    done = subprocess.run(
        [sys.executable, "-m", "accel_cli", "launch", *options, "train.py", str(tmp_path), kind],
        capture_output=True, text=True, check=False, cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HOME": str(tmp_path)},
    )  # fmt: skip
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    assert "Replica group 1 is healed in sync" in output
    assert "of 2 replica groups train" in output
    first, second = (torch.load(tmp_path / f"end.{group}", weights_only=True) for group in (0, 1))
    assert all(torch.equal(a, b) for a, b in zip(first["weights"], second["weights"], strict=True))
    assert first["rate"] == second["rate"]
    assert first["syncs"] == second["syncs"]
    # One process that does the same: the other group is missing, and then begins as a copy of the first.
    healed = int(re.search(r"healed in sync (\d+)", output)[1])
    for value, right in zip(first["weights"], train_disturbed(kind, back=4 * (healed - 1)), strict=True):
        torch.testing.assert_close(value, right, rtol=0, atol=1e-3)
