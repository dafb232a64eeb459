"""What one rank of thousands costs, counted on one machine: start, hang monitor, order of samples.

    uv run python tools/benchmarks/scale.py

`start`: requests to the store and seconds of a rank that joins its process group, and the groups of a mesh of
replicas of 64 shards; gloo is real, the store counts, and the other ranks do not exist. `monitor`: requests a
second of all ranks' hang monitors, seconds of the comparison of ranks, and bytes of the message of a timeout.
`data`: seconds and memory until the first batch of the last of 8,192 ranks, at the start and after a skip.
`save`: seconds and memory of one rank's plan, and of rank 0's index of all shards, for weights and Adam's
state of a Llama 2 70B that FSDP2 shards; the tensors are fakes, and the other ranks' plans are that of rank 0
with other offsets. Beside it, what DCP's own save does there: it unpickles the same plans, merges and pickles
them, and also pickles a plan for each rank.

Claims: requests do not grow with the ranks, posts are at most 1,000 a second, 10⁹ samples start within a
second and 64 MB.
"""

from __future__ import annotations

import multiprocessing
import pickle
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
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
    """A store that counts its requests, and has an empty value for each key."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: Counter[str] = Counter()

    def set(self, key: str, value: str) -> None:  # noqa: ARG002
        """Count a write."""
        self.asked["set"] += 1

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Count a read."""
        self.asked["multi_get"] += 1
        return [b""] * len(keys)

    def has_extended_api(self) -> bool:
        """Return whether several keys can be read at once."""
        return True


def start(world_size: int) -> None:
    """Print the requests and seconds of the last rank's start."""
    store, begun = CountingStore(), time.perf_counter()
    PartialState(cpu=True, store=store, rank=world_size - 1, world_size=world_size)
    joined, seconds = store.asked.total(), time.perf_counter() - begun
    mesh_of("cpu", {"dp_replicate": world_size // 64, "dp_shard": 64})
    meshed = time.perf_counter() - begun - seconds
    print(
        f"start   {world_size:5d} ranks: join {joined} requests, {seconds:.2f} s; "
        f"mesh of 2 groups {store.asked.total() - joined} requests, {meshed:.2f} s"
    )


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


if __name__ == "__main__":
    context = multiprocessing.get_context("fork")
    cases = [(start, 128), (start, 512), (start, 1024), (start, 4096), (monitor, 1024), (monitor, 16384)]
    with tempfile.TemporaryDirectory() as name:
        saves = [
            (function, Path(name), world_size)
            for world_size in (64, 256)
            for function in (plant, merge_as_dcp, merge)
        ]
        for function, *arguments in [*cases, (data, 0), (data, 900_005_888), *saves]:
            process = context.Process(target=function, args=arguments)
            process.start()
            process.join()
