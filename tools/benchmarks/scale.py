"""What one rank of thousands costs, counted on one machine: start, hang monitor, order of samples.

    uv run python tools/benchmarks/scale.py

`start`: requests to the store and seconds of a rank that joins its process group, and the groups of a mesh of
replicas of 64 shards; gloo is real, the store counts, and the other ranks do not exist. `monitor`: requests a
second of all ranks' hang monitors, seconds of the comparison of ranks, and bytes of the message of a timeout.
`data`: seconds and memory until the first batch of the last of 8,192 ranks, at the start and after a skip.

Claims: requests do not grow with the ranks, posts are at most 1,000 a second, 10⁹ samples start within a
second and 64 MB.
"""

from __future__ import annotations

import multiprocessing
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.utils.data import BatchSampler

from accel_plugins.parallelism.config import mesh_of
from accel_state import PartialState
from accel_state.hang_monitor import HangMonitor
from accel_state.rank_status import RankStatus, format_statuses
from accel_state.stragglers import find_slow
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


def _peak_mb() -> float:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


if __name__ == "__main__":
    context = multiprocessing.get_context("fork")
    cases = [(start, 128), (start, 512), (start, 1024), (start, 4096), (monitor, 1024), (monitor, 16384)]
    for function, argument in [*cases, (data, 0), (data, 900_005_888)]:
        process = context.Process(target=function, args=(argument,))
        process.start()
        process.join()
