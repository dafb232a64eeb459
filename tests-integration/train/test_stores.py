"""Checkpoints in a bucket: a real S3 server behind a proxy that drops, delays, cuts and repeats requests."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from accel_bigmodel import init_empty_weights, load_checkpoint_and_dispatch
from accel_plugins.fsdp.plugin import FullyShardedDataParallelPlugin
from accel_plugins.kwargs import DataLoaderConfiguration, ProjectConfiguration
from accel_state import remote
from accel_state.errors import CheckpointError, CheckpointWriteError
from accel_train import Accelerator
from accel_train.checkpoint.single_files import merge_fsdp_weights
from harness import distributed
from harness.killing import Crowd, mortal
from harness.pool import shared_nursery
from harness.stores import BUCKET, faulty_store, seen_by, set_faults, using_store

if TYPE_CHECKING:
    from collections.abc import Iterator

WIDTH = 1100  # a layer is 4.8 MB, so that files have several parts of 5 MB


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with faulty_store() as url:
        yield url


@pytest.fixture
def endpoint(server: str) -> Iterator[str]:
    set_faults(server)
    yield server
    set_faults(server)


def build(folder: str | None = None, width: int = 4, seed: int = 0, **options: Any) -> tuple:
    config = ProjectConfiguration(
        project_dir=folder, automatic_checkpoint_naming=folder is not None, **options.pop("project", {})
    )
    accelerator = Accelerator(
        cpu=True,
        project_config=config,
        dataloader_config=DataLoaderConfiguration(resume_mid_epoch=True),
        **options,
    )
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, width), nn.Linear(width, width), nn.Linear(width, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = torch.utils.data.DataLoader(torch.arange(64.0).view(16, 4) / 64, batch_size=2, shuffle=True)
    return (accelerator, *accelerator.prepare(model, optimizer, loader))


def train(run: tuple, batches: int = 2) -> None:
    accelerator, model, optimizer, loader = run
    for batch, _ in zip(loader, range(batches), strict=False):
        accelerator.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()


def tensors(run: tuple) -> list[torch.Tensor]:
    _, model, optimizer, _ = run
    rows = [*model.parameters(), *(value["exp_avg"] for value in optimizer.optimizer.state.values())]
    return [local(row).detach().clone() for row in rows]


def local(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def expect(run: tuple, expected: list[torch.Tensor]) -> None:
    now = tensors(run)
    assert len(now) == len(expected)
    assert all(map(torch.equal, now, expected))


@pytest.mark.parametrize("blocking", [pytest.param(True, marks=pytest.mark.thorough), False])
@distributed(world_size=2)
def test_a_run_in_a_bucket_resumes_bit_for_bit(endpoint: str, blocking: bool) -> None:
    with using_store(endpoint) as bucket:
        folder = f"{bucket}/resume{blocking}"
        run = build(folder, WIDTH, project={"total_limit": 2})
        for _ in range(3):
            train(run)
            saving = run[0].save_state(blocking=blocking)
        if not blocking:
            saving.wait()  # another `Accelerator` would load the checkpoint before it
        expected = tensors(run)
        other = build(folder, WIDTH, seed=1)
        assert other[0].has_checkpoint
        other[0].load_state()
        expect(other, expected)
        assert other[0].save_iteration == 3
        numbers = {name.partition("/")[0] for name in remote.RemotePath(f"{folder}/checkpoints").sizes()}
        assert numbers == {"checkpoint_1", "checkpoint_2"}
        dist.barrier()


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.thorough) for n in range(1, 20))])
@distributed(world_size=2)
def test_requests_that_are_dropped_delayed_cut_and_repeated_change_nothing(endpoint: str, seed: int) -> None:
    rank = dist.get_rank()
    with using_store(endpoint) as bucket:
        folder = f"{bucket}/faults{seed}"
        run = build(folder, WIDTH, project={"total_limit": 1})
        train(run)
        run[0].save_state()
        train(run)
        if rank == 0:
            set_faults(endpoint, rate=0.15, seed=seed)
        dist.barrier()
        run[0].save_state()
        expected = tensors(run)
        other = build(folder, WIDTH, seed=1)
        other[0].load_state()
        expect(other, expected)
        dist.barrier()
        if rank == 0:
            assert sum(seen_by(endpoint)["faults"].values()) > 3
            set_faults(endpoint)


@distributed(world_size=2)
def test_a_rank_reads_the_bytes_of_its_own_shards(endpoint: str) -> None:
    plugin = {"fsdp_version": 2, "state_dict_type": "SHARDED_STATE_DICT", "reshard_after_forward": True}
    with using_store(endpoint) as bucket:
        folder = f"{bucket}/sharded"
        run = build(None, WIDTH, fsdp_plugin=FullyShardedDataParallelPlugin(**plugin))
        train(run)
        run[0].save_state(folder)
        expected = tensors(run)
        train(run)
        run[0].save_state(folder, blocking=False).wait()  # in place of the first
        run[0].save_state(f"{bucket}/again")
        latest = tensors(run)
        assert not torch.equal(latest[0], expected[0])
        dist.barrier()
        if dist.get_rank() == 0:
            set_faults(endpoint)
        dist.barrier()
        other = build(None, WIDTH, seed=1, fsdp_plugin=FullyShardedDataParallelPlugin(**plugin))
        other[0].load_state(folder)
        expect(other, latest)
        dist.barrier()
        if dist.get_rank() == 0:
            sizes = remote.RemotePath(folder).sizes()
            read = seen_by(endpoint)["bytes"]
            for name, size in sizes.items():
                # Once to compare the digest, once by the rank whose shards these are.
                assert read.get(f"/{BUCKET}/sharded/{name}", 0) <= 2.5 * size + 1_000_000, name
        dist.barrier()
        merge_fsdp_weights(f"{folder}/pytorch_model_fsdp_0", f"{bucket}/merged")
        assert remote.RemotePath(f"{bucket}/merged/model.safetensors").is_file()


@distributed(world_size=2)
def test_what_the_store_refuses_is_one_sentence_on_every_rank_and_the_last_checkpoint_stays(
    endpoint: str,
) -> None:
    rank = dist.get_rank()
    with using_store(endpoint) as bucket:
        run = build(f"{bucket}/refused")
        run[0].save_state()
        expected = tensors(run)
        train(run)
        with pytest.raises(CheckpointWriteError, match=r"rank 0: 's3://nowhere/x.*bucket does not exist"):
            build()[0].save_state("s3://nowhere/x")
        for fault, words in {
            "denied": "AccessDenied by the proxy",
            "error": "InternalError by the proxy",
        }.items():
            dist.barrier()
            if rank == 0:
                set_faults(endpoint, kinds=[fault], methods=["PUT"], path="optimizer")
            dist.barrier()
            with pytest.raises(
                CheckpointWriteError, match=rf"rank 0 could not write 'optimizer.bin': {words}"
            ):
                run[0].save_state()
            dist.barrier()
            if rank == 0:
                set_faults(endpoint, kinds=[fault], methods=["GET"], path="checkpoint_0/optimizer")
            dist.barrier()
            with pytest.raises(CheckpointError, match=words):
                run[0].load_state(f"{bucket}/refused/checkpoints/checkpoint_0")
        dist.barrier()
        if rank == 0:
            set_faults(endpoint)
        dist.barrier()
        other = build(f"{bucket}/refused", seed=1)
        other[0].load_state()
        expect(other, expected)


def test_a_file_that_is_replaced_while_it_is_read_is_found(endpoint: str) -> None:
    with using_store(endpoint) as bucket:
        accelerator = Accelerator(cpu=True)
        model = nn.Linear(4, 4)
        accelerator.save_model(model, f"{bucket}/changing")
        file = remote.RemotePath(f"{bucket}/changing/model.safetensors")
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        real = remote.RemoteFile.read_at

        def read_at(self: Any, view: memoryview, position: int) -> None:
            real(self, view, position)
            if position > 8:
                file.write_bytes(bytes(content))

        with pytest.MonkeyPatch.context() as patch, init_empty_weights():
            patch.setattr(remote.RemoteFile, "read_at", read_at)
            with pytest.raises(
                CheckpointError, match=r"changing/model.safetensors' was replaced while it was read"
            ):
                load_checkpoint_and_dispatch(nn.Linear(4, 4), f"{bucket}/changing")


def test_a_device_map_reads_the_bytes_of_its_own_blocks(endpoint: str, tmp_path: Path) -> None:
    with using_store(endpoint) as bucket:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
        Accelerator(cpu=True).save_model(model, f"{bucket}/blocks", max_shard_size="12MB")
        with init_empty_weights():
            empty = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
            part = nn.Sequential(nn.Linear(WIDTH, WIDTH))
        loaded = load_checkpoint_and_dispatch(empty, f"{bucket}/blocks", device_map={"": "cpu"})
        assert all(map(torch.equal, loaded.parameters(), model.parameters()))
        set_faults(endpoint)
        load_checkpoint_and_dispatch(part, f"{bucket}/blocks")
        assert torch.equal(part[0].weight, model[0].weight)
        assert sum(seen_by(endpoint)["bytes"].values()) < 3 * part[0].weight.nbytes
        on_disk = load_checkpoint_and_dispatch(
            nn.Sequential(*(nn.Linear(WIDTH, WIDTH, device="meta") for _ in range(4))),
            f"{bucket}/blocks",
            device_map={"0": "cpu", "1": "disk", "2": "disk", "3": "disk"},
            offload_folder=tmp_path,
        )
        rows = torch.randn(2, WIDTH)
        assert torch.equal(on_disk(rows), model(rows))


ENDS_AT_ONCE = """
import sys
from harness.stores import using_store
from accel_train import Accelerator
import torch
with using_store(sys.argv[1]) as bucket:
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(torch.nn.Linear(1100, 1100))
    accelerator.save_state(f"{bucket}/ending", blocking=False)
    import fsspec.config
    settings = fsspec.config.conf["s3"]
fsspec.config.conf["s3"] = settings
"""


def test_the_end_of_the_program_waits_for_an_upload(endpoint: str) -> None:
    set_faults(endpoint, kinds=["delay"], seconds=0.3)
    paths = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", ENDS_AT_ONCE, endpoint],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    set_faults(endpoint)
    with using_store(endpoint) as bucket:
        manifest = json.loads(remote.RemotePath(f"{bucket}/ending/accel_manifest.json").read_bytes())
    assert "model.safetensors" in manifest["files"]


EPOCHS = 2


@mortal
def train_in_a_bucket(
    endpoint: str, folder: str, result: str, moment: int | None, blocking: bool, in_place: bool
) -> None:
    """Train from wherever the last run was, saving every other batch; write the weights at the end."""
    torch.set_num_threads(1)
    if moment is not None:
        die_at(moment)
    with using_store(endpoint) as bucket:
        target = f"{bucket}/{folder}/only" if in_place else None
        project = ProjectConfiguration(
            project_dir=f"{bucket}/{folder}", automatic_checkpoint_naming=not in_place, total_limit=2
        )
        accelerator = Accelerator(
            cpu=True,
            project_config=project,
            dataloader_config=DataLoaderConfiguration(resume_mid_epoch=True),
        )
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        loader = torch.utils.data.DataLoader(torch.arange(64.0).view(16, 4) / 64, batch_size=2, shuffle=True)
        # Without DistributedDataParallel, which takes new processes seconds to import.
        model = accelerator.prepare_model(model, evaluation_mode=True)
        optimizer, loader = accelerator.prepare(optimizer, loader)
        if is_saved(target) if in_place else accelerator.has_checkpoint:
            accelerator.load_state(target)
        while loader.iteration < EPOCHS:
            for index, batch in enumerate(loader):
                accelerator.backward(model(batch).square().mean())
                for parameter in model.parameters():
                    parameter.grad = accelerator.reduce(parameter.grad, "mean")
                optimizer.step()
                optimizer.zero_grad()
                if index % 2:
                    accelerator.save_state(target, blocking=blocking)
        accelerator.save_state(target)
        if accelerator.is_main_process:
            torch.save([p.detach() for p in model.parameters()], result)


def is_saved(target: str | None) -> bool:
    """Return whether a first save to a folder was committed before its process died."""
    return remote.RemotePath(f"{target}/accel_manifest.json").is_file()


def die_at(moment: int) -> None:
    """Kill this process at one of its changes of the store: before it, or after it if the number is even."""
    left = [moment]

    def mortal_change(change: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            left[0] -= 1
            dies = left[0] == 0
            if dies and moment % 2:
                os.kill(os.getpid(), signal.SIGKILL)
            made = change(*args, **kwargs)
            if dies:
                os.kill(os.getpid(), signal.SIGKILL)
            return made

        return call

    for name in ("write_bytes", "upload", "copy_to", "unlink", "remove_tree"):
        setattr(remote.RemotePath, name, mortal_change(getattr(remote.RemotePath, name)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "kills"),
    [pytest.param(*case, marks=pytest.mark.thorough) for case in ((2, 3), (1, 60), (2, 60))],
)
def test_a_run_that_is_killed_again_and_again_ends_like_an_undisturbed_one(
    endpoint: str, tmp_path: Path, world_size: int, kills: int
) -> None:
    crowd, chance = Crowd(shared_nursery(), world_size), random.Random(world_size)
    plain = {"endpoint": endpoint, "moment": None, "blocking": True, "in_place": False}
    assert crowd.run(train_in_a_bucket, folder=f"whole{world_size}", result=str(tmp_path / "r"), **plain)
    expected = torch.load(tmp_path / "r")
    killed = run = 0
    while killed < kills:
        run += 1
        folder, result = f"killed{world_size}-{kills}-{run}", tmp_path / f"r{run}"
        how = {"blocking": chance.random() < 0.5, "in_place": chance.random() < 0.3}
        while not crowd.run(
            train_in_a_bucket,
            victim=chance.randrange(world_size),
            endpoint=endpoint,
            folder=folder,
            result=str(result),
            moment=chance.randrange(1, 80),
            **how,
        ):
            killed += 1
        assert all(map(torch.equal, expected, torch.load(result)))
