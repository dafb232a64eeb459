"""What one rank of thousands costs, counted on one machine: start, hang monitor, order of samples.

    uv run python tools/benchmarks/scale.py

`start`: requests to the store and seconds of a rank that joins its process group, and the groups of its mesh,
for DDP, HSDP with replicas of 32 shards, and FSDP2 with TP and PP; gloo is real, the store counts, and the
other ranks do not exist (the gloo of 64 ranks connects them all, and needs them). `ranks`: the same of
rank 0 of 2, 4 and 8 real ranks, and the requests of its first collective in each group. `replay`: seconds of
one `TCPStore` with the starts of all ranks; torch looks up names as it connects. `monitor`: requests a
second of all ranks' hang monitors, seconds to compare ranks, and bytes of the message of a timeout. `data`:
seconds and memory until the first batch of the last of 8,192 ranks, at the start and after a skip.
`save`: seconds of processor time and memory of rank 0's plan, and of its index of all shards, for weights and
Adam's state of a Llama 2 70B and 3.1 405B; the tensors are fakes, and the other ranks' shards are computed by
torch. Beside it, what DCP's own save does there: it unpickles all plans, merges and pickles them, and also
pickles a plan for each rank. `load`: the same of a rank of a load onto 768 ranks. `launch`: seconds and bytes
of `accel launch --dry_run`.

Claims: requests do not grow with the ranks, the starts of 1,024 ranks are answered within 10 s, posts are at
most 1,000 a second, 10⁹ samples start within a second and 64 MB, a dry run of 512 nodes ends within 2 s.
"""

from __future__ import annotations

import math
import pickle
import subprocess
import sys
import tempfile
import time
from array import array
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import multiprocessing
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import BatchSampler

from accel_plugins.parallelism.config import mesh_of
from accel_plugins.sharding.folder import ShardWriter, _LoadPlanner, local_metadata, read_index, write_index
from accel_plugins.sharding.state import INDEX_NAME, local_metadata_file, shard_file
from accel_state import PartialState
from accel_state.hang_monitor import HangMonitor
from accel_state.rank_status import RankStatus, find_slow, format_statuses
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


def start(world_size: int, axes: dict[str, int]) -> list[tuple[str, Any]]:
    """Print the requests and seconds of the last rank's start; return the requests. DDP has no axes."""
    store, begun = CountingStore(), time.perf_counter()
    PartialState(cpu=True, store=store, rank=world_size - 1, world_size=world_size)
    joined, seconds = len(store.asked), time.perf_counter() - begun
    if axes:
        mesh_of("cpu", axes)
    meshed = time.perf_counter() - begun - seconds
    print(
        f"start   {world_size:5d} ranks, {axes or 'DDP'}: join {joined} requests, {seconds:.2f} s; "
        f"mesh {len(store.asked) - joined} requests, {meshed:.2f} s"
    )
    return store.asked


def replay(world_size: int) -> None:
    """Print the seconds in which one store takes the connections, and answers the starts, of all ranks."""
    asked = start(world_size, {"dp_replicate": world_size // 64, "dp_shard": 64})
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


class Llama(NamedTuple):
    """Sizes of a Llama, whose weights and Adam's state are saved."""

    layers: int
    wide: int
    inner: int
    vocabulary: int

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of each tensor."""
        _, wide, inner, vocabulary = self
        block = {
            f"self_attn.{name}_proj": (rows, wide)
            for name, rows in zip("qkvo", (wide, 1024, 1024, wide), strict=True)
        }
        block |= {
            "mlp.gate_proj": (inner, wide),
            "mlp.up_proj": (inner, wide),
            "mlp.down_proj": (wide, inner),
        }
        block |= {"input_layernorm": (wide,), "post_attention_layernorm": (wide,)}
        shapes = {f"{layer}.{name}": shape for layer in range(self.layers) for name, shape in block.items()}
        shapes |= {"embed_tokens": (vocabulary, wide), "lm_head": (vocabulary, wide), "norm": (wide,)}
        return {
            f"{kind}.{name}": row
            for kind in ("model", "exp_avg", "exp_avg_sq")
            for name, row in shapes.items()
        }


MODELS = {"70B": Llama(80, 8192, 28672, 32000), "405B": Llama(126, 16384, 53248, 128256)}


@cache
def layout(
    kind: str, shape: tuple[int, ...], axes: tuple[tuple[str, int], ...], rank: int
) -> tuple[Any, ...]:
    """Return placements, local shape and offsets of a tensor; no shape where another rank writes it."""
    names, sizes = zip(*axes, strict=True)
    placements: list[Any] = [Replicate()] * ("dp_replicate" in names) + [Shard(0)]
    if "tp" in names:
        by_columns = [_StridedShard(0, split_factor=sizes[-1]), Shard(0)]
        by_rows = [Shard(0), Shard(1)]
        norm = [Shard(0), Replicate()]
        placements = norm if "norm" in kind else by_rows if kind in {"o_proj", "down_proj"} else by_columns
    coordinate = [int(place) for place in np.unravel_index(rank, sizes)]
    nested = sizes, coordinate, placements
    if isinstance(placements[0], _StridedShard):  # the same, without tensors of indices
        nested = sizes[::-1], coordinate[::-1], [Shard(0), Shard(0)]
    local, offsets = _compute_local_shape_and_global_offset(shape, *nested)
    is_copy = any(place and kind.is_replicate() for place, kind in zip(coordinate, placements, strict=True))
    return placements, None if is_copy or 0 in local else torch.Size(local), torch.Size(offsets)


def tensors_of(model: str, axes: dict[str, int], rank: int) -> list[tuple[str, Any, Any, Any]]:
    """List the name, full and local shape, and offsets, of each tensor that a rank writes."""
    layouts = [
        (name, torch.Size(shape), *layout(name.rpartition(".")[2], shape, (*axes.items(),), rank)[1:])
        for name, shape in MODELS[model].shapes().items()
    ]
    return [row for row in layouts if row[2] is not None]


def fakes(model: str, axes: dict[str, int], rank: int) -> dict[str, Any]:
    """Return the state of a rank, whose tensors have no values."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=math.prod(axes.values()))
    mesh, state = mesh_of("cpu", axes), {}
    for name, shape in MODELS[model].shapes().items():
        placements, local, _ = layout(name.rpartition(".")[2], shape, (*axes.items(),), rank)
        full = torch.empty(shape, device="meta")
        fake = full.new_empty(local or (0, *shape[1:]))
        state[name] = DTensor.from_local(
            fake, mesh, placements, run_check=False, shape=full.shape, stride=full.stride()
        )
    return state


def plan(folder: Path, model: str, axes: dict[str, int]) -> None:
    """Print the cost of rank 0's plan, and of the next save's; write the metadata files of all ranks."""
    state, before = fakes(model, axes, 0), _peak_mb()
    begun = time.process_time()
    made: Any = ShardWriter(state, rank=0)._plan
    first, begun = time.process_time() - begun, time.process_time()
    ShardWriter(state, rank=0)
    again = time.process_time() - begun
    properties = {item.index.fqn: item.tensor_data.properties for item in made.items}
    assert [*properties] == [name for name, *_ in tensors_of(model, axes, 0)]
    print(
        f"save    {model}, {axes}: rank 0 plans {len(properties)} tensors in {first:.2f} s, in the next "
        f"save in {again:.2f} s, {_peak_mb() - before:.0f} MB",
        flush=True,
    )
    for rank in range(math.prod(axes.values())):
        rows, numbers = [], array("q")
        for name, shape, local, offsets in tensors_of(model, axes, rank):
            rows.append((name, properties.get(name, next(iter(properties.values()))), shape))
            numbers.extend((*offsets, *local, 0, 1000))
        content = local_metadata(rows, made.planner_data, numbers)
        (folder / local_metadata_file(rank)).write_bytes(content)


def merge(folder: Path, model: str, axes: dict[str, int]) -> None:
    """Print the cost of the index of all shards."""
    before, begun = _peak_mb(), time.process_time()
    write_index(folder, range(math.prod(axes.values())))
    seconds, megabytes = time.process_time() - begun, (folder / INDEX_NAME).stat().st_size / 1e6
    print(
        f"save    {model}, {axes}: rank 0's index in {seconds:.1f} s, {_peak_mb() - before:.0f} MB; "
        f"{megabytes:.0f} MB on the disk"
    )


def load(folder: Path, model: str, axes: dict[str, int]) -> None:
    """Print the cost of the plan of one rank of a load onto other ranks."""
    state, before, begun = fakes(model, axes, 1), _peak_mb(), time.process_time()
    index = read_index(folder)
    read = time.process_time() - begun
    planner = _LoadPlanner()
    planner.set_up_planner(state, index, is_coordinator=False)
    items = planner.create_local_plan().items
    print(
        f"load    {model}, {axes}: index read in {read:.1f} s, {len(items)} reads planned in "
        f"{time.process_time() - begun - read:.1f} s, {_peak_mb() - before:.0f} MB"
    )


def save_as_dcp(folder: Path, model: str, axes: dict[str, int]) -> None:
    """Print the cost of a save with DCP's own plans, which rank 0 gathers, merges and scatters."""
    planner = DefaultSavePlanner()
    planner.set_up_planner(fakes(model, axes, 0), is_coordinator=True)
    made = planner.create_local_plan()
    files: list[bytes] = []
    for rank in range(math.prod(axes.values())):
        own: list[WriteItem] = []
        for name, shape, local, offsets in tensors_of(model, axes, rank):
            data = TensorWriteData(ChunkStorageMetadata(offsets, local), TensorProperties(), shape)
            own.append(WriteItem(MetadataIndex(name, offsets), WriteItemType.SHARD, tensor_data=data))
        stored = StorageInfo(shard_file(rank), 0, 1000)
        results = [WriteResult(item.index, 1000, stored) for item in own]
        files.append(pickle.dumps((replace(made, items=own), results)))
    before, begun = _peak_mb(), time.process_time()
    gathered = [pickle.loads(text) for text in files]
    plans, index = DefaultSavePlanner().create_global_plan([own for own, _ in gathered])
    scattered = [pickle.dumps(own) for own in plans]
    index.storage_data = {result.index: result.storage_data for _, results in gathered for result in results}
    (folder / INDEX_NAME).write_bytes(pickle.dumps(index))
    seconds, received, sent = (
        time.process_time() - begun,
        *(sum(map(len, x)) / 1e6 for x in (files, scattered)),
    )
    print(
        f"save    {model}, {axes}: DCP's own in {seconds:.1f} s, {_peak_mb() - before:.0f} MB; "
        f"{received:.0f} MB gathered, {sent:.0f} MB of plans sent"
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
SAVED = (
    {"dp_replicate": 64, "dp_shard": 64},
    *({"dp_shard": ranks} for ranks in (256, 1024, 4096)),
    *({"dp_shard": ranks // 8, "tp": 8} for ranks in (256, 1024, 4096)),
)
LOADED = {"dp_shard": 96, "tp": 8}

if __name__ == "__main__":
    context = multiprocessing.get_context("fork")
    worlds = (128, 512, 4096)
    cases: list[tuple[Any, ...]] = [(start, ranks, {}) for ranks in worlds]
    cases += [(start, ranks, {"dp_replicate": ranks // 32, "dp_shard": 32}) for ranks in worlds]
    cases += [(start, ranks, {"pp": 4, "dp_shard": ranks // 32, "tp": 8}) for ranks in worlds]
    cases += [(replay, 1024), (monitor, 1024), (monitor, 16384)]
    meshes = [(ranks, *case) for case in MESHES]
    launches = [(launch, name, nodes) for name in ("slurm", "kubeflow", "ray") for nodes in (2, 512)]
    saves: list[tuple[Any, ...]] = [(save_as_dcp, "70B", SAVED[0])]
    for model in MODELS:
        for axes in SAVED:
            saves += [(plan, model, axes), (merge, model, axes), (load, model, LOADED)]
    with tempfile.TemporaryDirectory() as name:
        for function, *arguments in [
            *(*launches, *meshes, *cases, (data, 0), (data, 900_005_888)),
            *((function, Path(name), *arguments) for function, *arguments in saves),
        ]:
            process = context.Process(target=function, args=arguments)
            process.start()
            process.join()
