"""What one rank of thousands costs, counted on one machine: start, hang monitor, order of samples.

    uv run python tools/benchmarks/scale.py

`start`: requests to the store and seconds of a rank that joins its process group, and the groups of a mesh of
replicas of 64 shards; gloo is real, the store counts, and the other ranks do not exist. `ranks`: the same of
rank 0 of 2, 4 and 8 real ranks, and the requests of its first collective in each group. `replay`: seconds of
one `TCPStore` with the starts of all ranks; torch looks up names as it connects. `monitor`: requests a
second of all ranks' hang monitors, seconds to compare ranks, and bytes of the message of a timeout. `data`:
seconds and memory until the first batch of the last of 8,192 ranks, at the start and after a skip.
`save`: seconds and memory of one rank's plan, and of rank 0's index of all shards, for weights and Adam's
state of a Llama 2 70B that FSDP2 shards; the tensors are fakes, and the other ranks' plans are that of rank 0
with other offsets. Beside it, what DCP's own save does there: it unpickles the same plans, merges and pickles
them, and also pickles a plan for each rank. `launch`: seconds and bytes of `accel launch --dry_run`.

Claims: requests do not grow with the ranks, the starts of 1,024 ranks are answered within 10 s, posts are at
most 1,000 a second, 10⁹ samples start within a second and 64 MB, a dry run of 512 nodes ends within 2 s.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import BatchSampler

from accel_plugins.parallelism.config import mesh_of
from accel_plugins.sharding.folder import ShardWriter, read_index, write_index
from accel_plugins.sharding.state import INDEX_NAME, local_metadata_file, shard_file
from accel_state import PartialState
from accel_state.hang_monitor import HangMonitor
from accel_state.rank_status import RankStatus, format_statuses
from accel_state.stragglers import find_slow
from accel_state.torch_private import StorageInfo
from accel_train.data.samplers import SeedableRandomSampler
from accel_train.data.shards import BatchSamplerShard, Draw

SAMPLES = range(10**9)


class CountingStore(dist.Store):
    """A store that records its requests, and passes them on; without another, each key has an empty value."""

    def __init__(self, inner: dist.Store | None = None) -> None:
        super().__init__()
        self.inner = inner
        self._asked: list[tuple[str, Any]] = []

    @property
    def asked(self) -> list[tuple[str, Any]]:
        """The requests but for those of the hang monitor, which sends them while time passes."""
        return [row for row in self._asked if "hang_monitor" not in str(row)]

    def set(self, key: str, value: str) -> None:
        """Record a write."""
        self._asked.append(("set", (key, value)))
        if self.inner is not None:
            self.inner.set(key, value)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Record a read."""
        self._asked.append(("multi_get", (keys,)))
        return [b""] * len(keys) if self.inner is None else self.inner.multi_get(keys)

    def get(self, key: str) -> bytes:
        """Record a read of one key."""
        self._asked.append(("get", (key,)))
        return b"" if self.inner is None else self.inner.get(key)

    def wait(self, keys: list[str], timeout: Any = None) -> None:
        """Record a wait for keys."""
        self._asked.append(("wait", (keys,)))
        if self.inner is not None:
            self.inner.wait(keys, *([] if timeout is None else [timeout]))

    def deleteKey(self, key: str) -> bool:  # noqa: N802 - the binding calls it so
        """Delete a key of the other store."""
        return self.inner is not None and self.inner.delete_key(key)

    def has_extended_api(self) -> bool:
        """Return whether several keys can be read at once."""
        return True

    def clone(self) -> CountingStore:
        """Return this store, which needs no connection of its own to each thread."""
        return self


def start(world_size: int) -> list[tuple[str, Any]]:
    """Print the requests and seconds of the last rank's start; return the requests."""
    store, begun = CountingStore(), time.perf_counter()
    PartialState(cpu=True, store=store, rank=world_size - 1, world_size=world_size)
    joined, seconds = len(store.asked), time.perf_counter() - begun
    mesh_of("cpu", {"dp_replicate": world_size // 64, "dp_shard": 64})
    meshed = time.perf_counter() - begun - seconds
    print(
        f"start   {world_size:5d} ranks: join {joined} requests, {seconds:.2f} s; "
        f"mesh of 2 groups {len(store.asked) - joined} requests, {meshed:.2f} s"
    )
    return store.asked


def replay(world_size: int) -> None:
    """Print the seconds in which one store takes the connections, and answers the starts, of all ranks."""
    asked = start(world_size)
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    begun = time.perf_counter()
    with ThreadPoolExecutor(64) as threads:
        ports = [server.port] * world_size
        clients = [*threads.map(lambda port: dist.TCPStore("127.0.0.1", port, is_master=False), ports)]
    connected = time.perf_counter() - begun
    for rank, client in enumerate(clients):
        for _, (key, value) in asked:  # they are writes
            client.set(f"{key}/{rank}", value)
    print(
        f"replay  {world_size:5d} ranks: as many connections in {connected:.2f} s, {len(asked) * world_size} "
        f"requests in {time.perf_counter() - begun - connected:.2f} s"
    )


def rank_of(rank: int, world_size: int, axes: dict[str, int], port: int) -> None:
    """Join the group and the mesh as one of several real ranks; print the requests of rank 0."""
    store = CountingStore(dist.TCPStore("127.0.0.1", port, is_master=False))
    PartialState(cpu=True, store=store, rank=rank, world_size=world_size)
    joined = len(store.asked)
    mesh = mesh_of("cpu", axes)
    meshed = len(store.asked) - joined
    for axis in axes:
        dist.all_reduce(torch.ones(1), group=mesh.get_group(axis))
    if rank == 0:
        print(
            f"ranks   {world_size:5d} ranks, {axes}: join {joined} requests, mesh {meshed}, first all_reduce "
            f"of each axis {len(store.asked) - joined - meshed}"
        )
    dist.barrier()


def ranks(world_size: int, axes: dict[str, int]) -> None:
    """Start real ranks that share one store."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    arguments = (world_size, axes, server.port)
    multiprocessing.start_processes(rank_of, arguments, nprocs=world_size, start_method="fork")


def launch(launcher: str, nodes: int) -> None:
    """Print the seconds and bytes of a dry run."""
    image = ["--image", "accel:latest"] if launcher == "kubeflow" else []
    command = [sys.executable, "-m", "accel_cli", "launch", "--launcher", launcher, "--nodes", str(nodes)]
    command += ["--gpus_per_node", "8", "--dry_run", *image, __file__]
    begun = time.perf_counter()
    shown = len(subprocess.run(command, check=True, capture_output=True).stdout)
    print(f"launch  {nodes:5d} nodes: {launcher} shows {shown} bytes in {time.perf_counter() - begun:.2f} s")


def monitor(world_size: int) -> None:
    """Print what the hang monitors of a world cost."""
    interval = HangMonitor(dist.HashStore(), rank=1, world_size=world_size, limit=600)._interval
    waiting: dict[str, Any] = {"location": "train.py:88", "source": "accelerator.backward(loss)"}
    statuses = {
        rank: RankStatus(rank=rank, collective=7, inside=rank > 0, **waiting) for rank in range(world_size)
    }
    begun = time.perf_counter()
    find_slow({rank: (rank * 7 % 13) / 13 for rank in statuses})
    seconds, text = time.perf_counter() - begun, format_statuses(statuses)
    print(
        f"monitor {world_size:5d} ranks: {world_size / interval:.0f} posts a second, slow ranks in "
        f"{seconds * 1e3:.1f} ms, a timeout prints {len(text)} bytes"
    )


def data(position: int) -> None:
    """Print the seconds and megabytes of the first batch from a position on, and the seconds of the next."""
    before, begun = _peak_mb(), time.perf_counter()
    batches = BatchSampler(SeedableRandomSampler(SAMPLES, data_seed=0), 8, drop_last=False)
    shard = BatchSamplerShard(batches, num_processes=8192, process_index=8191)
    drawn = next(iter(shard.iterate(Draw(start=position))))
    next(drawn)
    first = time.perf_counter() - begun
    next(drawn)
    print(
        f"data    {position:9d} of 10^9 samples, 8192 ranks: first batch {first:.3f} s, "
        f"{_peak_mb() - before:.1f} MB, the next one {time.perf_counter() - begun - first:.3f} s"
    )


def llama() -> dict[str, tuple[int, ...]]:
    """Return the shapes of a Llama 2 70B with Adam's state."""
    wide, inner, grouped = 8192, 28672, 1024
    block = {
        f"self_attn.{name}_proj": (rows, wide)
        for name, rows in zip("qkvo", (wide, grouped, grouped, wide), strict=True)
    }
    block |= {"mlp.gate_proj": (inner, wide), "mlp.up_proj": (inner, wide), "mlp.down_proj": (wide, inner)}
    block |= {"input_layernorm": (wide,), "post_attention_layernorm": (wide,)}
    shapes = {f"layers.{layer}.{name}": shape for layer in range(80) for name, shape in block.items()}
    shapes |= {"embed_tokens": (32000, wide), "lm_head": (32000, wide), "norm": (wide,)}
    kinds = ("model", "exp_avg", "exp_avg_sq")
    return {f"{kind}.{name}": shape for kind in kinds for name, shape in shapes.items()}


def plan(world_size: int) -> SavePlan:
    """Print the cost of rank 0's own plan; return it."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    mesh = mesh_of("cpu", {"dp_shard": world_size})
    state = {
        name: DTensor.from_local(
            torch.empty(-(-shape[0] // world_size), *shape[1:], device="meta"),
            mesh,
            [Shard(0)],
            run_check=False,
            shape=torch.Size(shape),
            stride=torch.empty(shape, device="meta").stride(),
        )
        for name, shape in llama().items()
    }
    begun = time.perf_counter()
    made = ShardWriter(state, rank=0)._plan
    seconds = time.perf_counter() - begun
    print(f"save    {world_size:5d} ranks: {len(made.items)} tensors planned in {seconds:.2f} s")
    return made


def plant(folder: Path, world_size: int) -> None:
    """Write the metadata files of all ranks."""
    made = plan(world_size)
    for rank in range(world_size):
        own: list[WriteItem] = []
        for item in made.items:
            data: Any = item.tensor_data
            rows = data.chunk.sizes[0]
            if rank * rows >= data.size[0]:
                continue
            offsets = torch.Size([rank * rows, *data.chunk.offsets[1:]])
            sizes = torch.Size([min(rows, data.size[0] - offsets[0]), *data.chunk.sizes[1:]])
            chunk = ChunkStorageMetadata(offsets, sizes)
            index = MetadataIndex(item.index.fqn, offsets)
            own.append(replace(item, index=index, tensor_data=replace(data, chunk=chunk)))
        results = [
            WriteResult(item.index, 1000, StorageInfo(shard_file(rank), number * 1000, 1000))
            for number, item in enumerate(own)
        ]
        text = pickle.dumps((replace(made, items=own), results))
        (folder / local_metadata_file(rank)).write_bytes(text)


def merge(folder: Path, world_size: int) -> None:
    """Print the cost of the index of all shards, and of its reading."""
    before, begun = _peak_mb(), time.perf_counter()
    write_index(folder, range(world_size))
    seconds, megabytes = time.perf_counter() - begun, _peak_mb() - before
    begun = time.perf_counter()
    read_index(folder)
    print(
        f"save    {world_size:5d} ranks: rank 0's index in {seconds:.1f} s, {megabytes:.0f} MB; "
        f"{(folder / INDEX_NAME).stat().st_size / 1e6:.0f} MB on the disk, read in "
        f"{time.perf_counter() - begun:.1f} s"
    )


def merge_as_dcp(folder: Path, world_size: int) -> None:
    """Print the cost of the same with DCP's own plans, which rank 0 gathers, merges and scatters."""
    before, begun = _peak_mb(), time.perf_counter()
    files = [(folder / local_metadata_file(rank)).read_bytes() for rank in range(world_size)]
    gathered = [pickle.loads(text) for text in files]
    plans, index = DefaultSavePlanner().create_global_plan([own for own, _ in gathered])
    scattered = [pickle.dumps(own) for own in plans]
    index.storage_data = {result.index: result.storage_data for _, results in gathered for result in results}
    pickle.dumps(index)
    seconds, megabytes = time.perf_counter() - begun, _peak_mb() - before
    print(
        f"save    {world_size:5d} ranks: DCP's own in {seconds:.1f} s, {megabytes:.0f} MB, and "
        f"{sum(map(len, scattered)) / 1e6:.0f} MB of plans sent"
    )


def _peak_mb() -> float:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


MESHES = (
    (2, {"dp_shard": 2}),
    (4, {"dp_replicate": 2, "dp_shard": 2}),
    (8, {"dp_replicate": 4, "dp_shard": 2}),
    (8, {"pp": 2, "dp_shard": 2, "tp": 2}),
)

if __name__ == "__main__":
    context = multiprocessing.get_context("fork")
    cases = [(start, 128), (start, 512), (start, 4096), (replay, 1024), (monitor, 1024), (monitor, 16384)]
    meshes = [(ranks, *case) for case in MESHES]
    launches = [(launch, name, nodes) for name in ("slurm", "kubeflow", "ray") for nodes in (2, 512)]
    with tempfile.TemporaryDirectory() as name:
        saves = [
            (function, Path(name), world_size)
            for world_size in (64, 256)
            for function in (plant, merge_as_dcp, merge)
        ]
        for function, *arguments in [
            *(*launches, *meshes, *cases),
            *((data, 0), (data, 900_005_888), *saves),
        ]:
            process = context.Process(target=function, args=arguments)
            process.start()
            process.join()
