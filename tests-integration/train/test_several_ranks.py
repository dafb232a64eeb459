"""Checkpoints of several ranks: agreement, failure on one of them, other numbers of ranks at load."""

from __future__ import annotations

import errno
import json
import os
import re
import time
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from accel_plugins.kwargs import DataLoaderConfiguration, InitProcessGroupKwargs, ProjectConfiguration
from accel_state import hang_monitor
from accel_state.accelerator_state import AcceleratorState
from accel_state.errors import CheckpointError, CheckpointWriteError, DistributedOperationException
from accel_train import Accelerator
from accel_train.checkpoint import files, save
from accel_train.checkpoint.layout import read_manifest
from harness import distributed


def build(folder: Path, **project: object) -> tuple:
    config = ProjectConfiguration(project_dir=folder, automatic_checkpoint_naming=True, **project)
    accelerator = Accelerator(
        cpu=True, project_config=config, dataloader_config=DataLoaderConfiguration(resume_mid_epoch=True)
    )
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(torch.arange(60.0).view(15, 4), batch_size=1, shuffle=True)
    return (accelerator, *accelerator.prepare(model, optimizer, loader))


def train(accelerator, model, optimizer, loader, batches: int, *, save: bool = False) -> list[int]:
    """Train some batches of an epoch, and save after the last; return which samples all ranks have seen."""
    seen: list[int] = []
    for batch in loader:
        seen += [int(row[0]) // 4 for row in accelerator.gather_for_metrics(batch)]
        accelerator.backward(model(batch / 60).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        batches -= 1
        if not batches:
            if save:
                accelerator.save_state()
            break
    return seen


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("blocking", [True, False])
@distributed(world_size=2)
def test_a_resumed_run_ends_like_the_undisturbed_one(tmp_path: Path, blocking: bool) -> None:
    whole = build(tmp_path / "whole")
    train(*whole, 8)
    train(*whole, 3)
    first = build(tmp_path / "run")
    train(*first, 8)
    saved = first[0].save_state(blocking=blocking)
    if not blocking:
        saved.wait()
    drawn = torch.rand(3)
    train(*first, 1)
    again = build(tmp_path / "run")
    torch.manual_seed(dist.get_rank())
    assert again[0].has_checkpoint
    again[0].load_state()
    assert torch.equal(drawn, torch.rand(3))
    train(*again, 3)
    assert torch.equal(weights(whole[1]), weights(again[1]))
    names = {path.name for path in (tmp_path / "run" / "checkpoints" / "checkpoint_0").iterdir()}
    assert {"random_states_0.pkl", "random_states_1.pkl", "data_position_1.bin"} <= names
    manifest = json.loads((tmp_path / "run/checkpoints/checkpoint_0/accel_manifest.json").read_text())
    assert manifest["world_size"] == 2
    assert set(manifest["files"]) == names - {"accel_manifest.json"}


@distributed(world_size=3)
def _part_of_an_epoch_on_three(folder: Path, batches: int) -> None:
    run = build(folder)
    if run[0].has_checkpoint:
        run[0].load_state()
    seen = train(*run, batches, save=True)
    if run[0].is_main_process:
        with (folder / "seen").open("a") as file:
            file.write(" ".join(map(str, seen)) + " ")


@distributed(world_size=2)
def _rest_of_an_epoch_on_two(folder: Path) -> None:
    run = build(folder)
    assert run[0].has_checkpoint
    run[0].load_state()
    seen = train(*run, -1)
    if run[0].is_main_process:
        with (folder / "seen").open("a") as file:
            file.write(" ".join(map(str, seen)) + " ")


def test_every_sample_comes_once_whatever_the_number_of_ranks(tmp_path: Path) -> None:
    _part_of_an_epoch_on_three(folder=tmp_path, batches=2)  # 6 of 15
    _part_of_an_epoch_on_three(folder=tmp_path, batches=1)  # 9 of 15
    _rest_of_an_epoch_on_two(folder=tmp_path)
    assert sorted(map(int, (tmp_path / "seen").read_text().split())) == list(range(15))


@distributed(world_size=2)
def test_hooks_get_the_models_without_wrappers_and_what_they_leave_is_loaded(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    models = [nn.Linear(2, 2), nn.Linear(3, 3)]
    prepared = accelerator.prepare(*models)
    given: list[list[nn.Module]] = []

    def on_save(found, weights, folder):
        given.append([*found])
        found.clear()  # a list of its own

    def on_load(found, folder):
        given.append([*found])
        found.pop()

    accelerator.register_save_state_pre_hook(on_save)
    accelerator.register_load_state_pre_hook(on_load)
    saved = [weights(model).clone() for model in models]
    accelerator.save_state(tmp_path / "c")
    with torch.no_grad():
        for model in models:
            model.weight.fill_(7.0)
    accelerator.load_state(tmp_path / "c")
    assert all(one is bare for found in given for one, bare in zip(found, models, strict=True))
    assert torch.equal(weights(models[0]), saved[0])
    assert (models[1].weight == 7.0).all()
    assert [type(model) for model in prepared] == [type(prepared[0])] * 2 != [nn.Linear] * 2


@pytest.mark.parametrize("hooked", [None, 1])
@distributed(world_size=2)
def test_what_hooks_of_slow_ranks_write_under_names_of_the_checkpoint_is_replaced(
    tmp_path: Path, hooked: int | None
) -> None:
    accelerator, model, *_ = build(tmp_path)
    rank = dist.get_rank()

    def on_save(found, weights, folder):
        if rank == 1:
            time.sleep(0.5)  # long after rank 0 could have written its files
        for name in ("model.safetensors", "random_states_0.pkl"):
            (Path(folder) / name).write_text(f"of the hook of rank {rank}")

    if hooked in {None, rank}:
        accelerator.register_save_state_pre_hook(on_save)
    before = weights(model).clone()
    path = accelerator.save_state()
    with torch.no_grad():
        model.module.weight.fill_(7.0)
    accelerator.load_state(path)
    assert torch.equal(weights(model), before)


@distributed(world_size=3)
def test_a_rank_without_random_numbers_gets_its_own(tmp_path: Path) -> None:
    run = build(tmp_path)
    path = Path(run[0].save_state())
    dist.barrier()
    if dist.get_rank() == 0:
        manifest = path / "accel_manifest.json"
        table = json.loads(manifest.read_text())
        table["world_size"] = 2
        del table["files"]["random_states_2.pkl"]
        manifest.write_text(json.dumps(table))
        (path / "random_states_2.pkl").unlink()
    dist.barrier()
    run[0].load_state()
    once = [torch.empty(2) for _ in range(3)]
    dist.all_gather(once, torch.rand(2))
    run[0].load_state()
    twice = [torch.empty(2) for _ in range(3)]
    dist.all_gather(twice, torch.rand(2))
    assert all(map(torch.equal, once, twice))
    assert not torch.equal(once[2], once[0])


@pytest.mark.parametrize("blocking", [pytest.param(True, marks=pytest.mark.thorough), False])
@distributed(world_size=2)
def test_the_main_process_alone_may_save_what_is_not_sharded(tmp_path: Path, blocking: bool) -> None:
    whole = build(tmp_path / "whole")
    losses = train(*whole, 5), train(*whole, 15)
    accelerator, model, optimizer, loader = run = build(tmp_path / "run")
    seen: list[int] = []
    waited: list[float] = []
    for number, batch in enumerate(loader, start=1):
        seen += [int(row[0]) // 4 for row in accelerator.gather_for_metrics(batch)]
        accelerator.backward(model(batch / 60).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        if number in {2, 3} and accelerator.is_main_process:
            began = time.monotonic()
            with mock.patch.object(save.logger, "warning") as warning:
                saved = accelerator.save_state(blocking=blocking)
            if not blocking:
                saved.wait()
            waited.append(time.monotonic() - began)
            text = warning.call_args.args[0] % warning.call_args.args[1:]
            assert re.search(r"save_state\(\) was called only on rank 0.*rank 1 waits elsewhere", text)
        if number == 5:
            break
    assert seen == losses[0]
    if accelerator.is_main_process:
        assert waited[1] < waited[0] < 30
    train(*run, 15)
    assert torch.equal(weights(model), weights(whole[1]))  # as if nothing had been saved
    accelerator.wait_for_everyone()
    names = {path.name for path in (tmp_path / "run/checkpoints/checkpoint_1").iterdir()}
    assert "random_states_0.pkl" in names
    assert "random_states_1.pkl" not in names
    again = build(tmp_path / "run")
    again[0].load_state(tmp_path / "run/checkpoints/checkpoint_1")
    resumed = train(*again, -1)
    assert resumed[:4] == losses[0][6:]
    assert sorted([*losses[0][:6], *resumed]) == list(range(15))


@distributed(world_size=2)
def test_the_last_save_of_a_program_may_be_that_of_the_main_process(tmp_path: Path) -> None:
    accelerator, *_ = build(tmp_path)
    for _ in range(2):
        if accelerator.is_main_process:
            accelerator.save_state()
        accelerator.wait_for_everyone()
    assert accelerator.has_checkpoint


@distributed(world_size=2, restart=True)
def test_another_rank_alone_does_not_save(tmp_path: Path) -> None:
    AcceleratorState._reset_state(True)
    timeout = InitProcessGroupKwargs(timeout=timedelta(seconds=3))
    accelerator = Accelerator(cpu=True, kwargs_handlers=[timeout])
    lines = Path(__file__).read_text().splitlines()
    first, second = (
        next(number for number, line in enumerate(lines, 1) if line.strip() == text)
        for text in ("accelerator.gather(torch.ones(1))", 'accelerator.save_state(tmp_path / "on one rank")')
    )
    with pytest.raises(DistributedOperationException) as raised:  # noqa: PT012 - of one of the calls
        if accelerator.is_main_process:
            accelerator.gather(torch.ones(1))
        else:
            accelerator.save_state(tmp_path / "on one rank")
    for rank, line in enumerate((first, second)):
        assert re.search(rf"rank {rank} (is|has left) [^;]*\.py:{line}\b", str(raised.value))
    assert not (tmp_path / "on one rank").exists()


@distributed(world_size=2)
def test_a_rank_that_comes_after_rank_0_has_saved_alone_goes_on(tmp_path: Path) -> None:
    run = build(tmp_path)
    accelerator, rank = run[0], dist.get_rank()
    for number in range(2):
        if rank == 1:  # seems to wait for rank 0, and does something else for long
            with hang_monitor.collective_scope("elsewhere"):
                while not (tmp_path / f"checkpoints/checkpoint_{number}/accel_manifest.json").exists():
                    time.sleep(0.01)
        with mock.patch.object(save.logger, "warning") as warning:
            accelerator.save_state()
        text = warning.call_args.args[0] % warning.call_args.args[1:]
        assert ("was called only on rank 0" if rank == 0 else "saved without its random states") in text
    train(*run, 1)
    path = Path(accelerator.save_state())
    assert path.name == "checkpoint_2"
    dist.barrier()
    assert {"random_states_0.pkl", "random_states_1.pkl"} <= {entry.name for entry in path.iterdir()}
    before = weights(run[1]).clone()
    train(*run, 1)
    accelerator.load_state()
    assert torch.equal(before, weights(run[1]))


class Sum:
    """A registered object whose state is a collective."""

    loaded: float = 0.0

    def state_dict(self) -> dict[str, float]:
        total = torch.ones(1)
        dist.all_reduce(total)
        return {"total": total.item()}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.loaded = state["total"]


@pytest.mark.parametrize("blocking", [True, False])
@distributed(world_size=2)
def test_the_state_of_a_registered_object_may_be_a_collective(tmp_path: Path, blocking: bool) -> None:
    accelerator, *_ = build(tmp_path)
    registered = Sum()
    accelerator.register_for_checkpointing(registered)
    accelerator.save_state(blocking=blocking)
    accelerator.load_state()
    assert registered.loaded == 2.0


@distributed(world_size=4)
def test_a_slow_rank_is_waited_for(tmp_path: Path) -> None:
    accelerator, *_ = build(tmp_path)
    if accelerator.process_index == 2:
        time.sleep(5)
    accelerator.save_state()
    assert accelerator.has_checkpoint


@distributed(world_size=2)
def test_other_arguments_on_another_rank_are_said_on_all(tmp_path: Path) -> None:
    accelerator, *_ = build(tmp_path)
    with pytest.raises(DistributedOperationException, match=r"rank 0: .*safe=True.*rank 1: .*safe=False"):
        accelerator.save_state(safe_serialization=accelerator.is_main_process)
    dist.barrier()
    assert not list((tmp_path / "checkpoints").iterdir())
    dist.barrier()  # before another rank begins the next one
    accelerator.save_state()
    with pytest.raises(DistributedOperationException, match=r"different folders: rank 0: 'a0'; rank 1: 'a1'"):
        accelerator.load_state(f"a{dist.get_rank()}")


class FullDisk:
    def __getattr__(self, name: str) -> object:
        return getattr(os, name)

    def write(self, descriptor: int, data: memoryview | bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("rank", [0, 1])
@distributed(world_size=2)
def test_a_full_disk_on_one_rank_is_an_error_on_all(tmp_path: Path, rank: int) -> None:
    run = build(tmp_path)
    run[0].save_state()
    before = weights(run[1]).clone()
    train(*run, 2)
    if dist.get_rank() == rank:
        files.os = FullDisk()
    try:
        with pytest.raises(CheckpointWriteError, match=rf"rank {rank} could not write .* No space left"):
            run[0].save_state()
    finally:
        files.os = os
    dist.barrier()
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["checkpoint_0"]
    run[0].load_state()
    assert torch.equal(before, weights(run[1]))


@distributed(world_size=2)
def test_all_ranks_pass_over_damage_to_the_same_checkpoint(tmp_path: Path) -> None:
    run = build(tmp_path)
    run[0].save_state()
    before = weights(run[1]).clone()
    train(*run, 1)
    newest = Path(run[0].save_state())
    for path in sorted(newest.iterdir()):  # of which each rank verifies some
        data = path.read_bytes()
        dist.barrier()
        if dist.get_rank() == 0:
            path.write_bytes(bytes(len(data)))
        dist.barrier()
        train(*run, 1)
        run[0].load_state()
        assert torch.equal(weights(run[1]), before), path.name
        dist.barrier()
        if dist.get_rank() == 0:
            path.write_bytes(data)


@distributed(world_size=2)
def test_a_damaged_file_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    run = build(tmp_path)
    path = Path(run[0].save_state())
    dist.barrier()
    if dist.get_rank() == 0:
        weights_file = path / "model.safetensors"
        weights_file.write_bytes(weights_file.read_bytes()[:-1] + b"\x7f")
    dist.barrier()
    with pytest.raises(CheckpointError, match=r"'model.safetensors' has the checksum"):
        run[0].load_state()


@distributed(world_size=2)
def test_an_object_that_cannot_be_loaded_on_one_rank_is_heard_on_all(tmp_path: Path) -> None:
    class Stubborn:
        def state_dict(self) -> dict[str, int]:
            return {}

        def load_state_dict(self, state: dict[str, int]) -> None:
            if dist.get_rank() == 1:
                raise ValueError("not me")

    accelerator, *_ = build(tmp_path)
    accelerator.register_for_checkpointing(Stubborn())
    accelerator.save_state()
    with pytest.raises(ValueError, match="not me"):
        accelerator.load_state()


@distributed(world_size=4)
def test_every_host_has_a_checkpoint_of_its_own(tmp_path: Path) -> None:
    rank = dist.get_rank()
    keep = {name: os.environ[name] for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE")}
    os.environ.update(LOCAL_RANK=str(rank % 2), LOCAL_WORLD_SIZE="2")
    try:
        run = build(tmp_path / f"host{rank // 2}", save_on_each_node=True, total_limit=1)
    finally:
        os.environ.update(keep)
    train(*run, 1)
    before = weights(run[1]).clone()
    for _ in range(2):
        run[0].save_state()
    folder = tmp_path / f"host{rank // 2}" / "checkpoints"
    assert [path.name for path in folder.iterdir()] == ["checkpoint_1"]
    names = {path.name for path in (folder / "checkpoint_1").iterdir()}
    assert {"model.safetensors", f"random_states_{rank}.pkl"} <= names
    assert f"random_states_{(rank + 2) % 4}.pkl" not in names
    manifest = read_manifest(folder / "checkpoint_1")
    assert manifest is not None
    assert {f"random_states_{rank // 2 * 2 + local}.pkl" for local in range(2)} <= manifest.files.keys()
    train(*run, 1)
    run[0].load_state()
    assert torch.equal(before, weights(run[1]))


@distributed(world_size=2)
def test_hosts_that_share_no_folder_keep_nothing_of_a_save_that_fails(tmp_path: Path) -> None:
    accelerator, *_ = build(tmp_path / "project")
    accelerator.project_configuration.automatic_checkpoint_naming = False
    host = tmp_path / f"host{dist.get_rank()}"
    host.mkdir()
    before = Path.cwd()
    os.chdir(host)
    try:
        with pytest.raises(
            CheckpointWriteError, match=r"rank 0 cannot find .*hosts do not share this folder"
        ):
            accelerator.save_state("c")
    finally:
        os.chdir(before)
    assert not [*host.iterdir()]


@distributed(world_size=2)
def test_the_folder_that_a_model_is_saved_in_is_there_on_every_rank(tmp_path: Path) -> None:
    accelerator, model, *_ = build(tmp_path)
    folder = tmp_path / "a" / "new one"
    if accelerator.is_main_process:
        time.sleep(0.5)  # the other rank comes first
    accelerator.save_model(model, folder)
    assert folder.is_dir()
    accelerator.wait_for_everyone()
    assert [path.name for path in folder.iterdir()] == ["model.safetensors"]
