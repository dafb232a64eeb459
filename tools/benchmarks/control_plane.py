"""Number of store requests of waiting ranks, for 16 to 2,048 simulated ranks and one real TCPStore.

    uv run python tools/benchmarks/control_plane.py [--ranks 16 64 ...] [--baseline-up-to 64] [--seconds 8]

Ranks are threads of eight processes, each with a connection of its own, a real hang monitor and a real
agreement. `slow writer`: all ranks agree on a checkpoint, and one arrives `--seconds` late; requests are
counted in between. `stall`: all ranks give up on a collective at the same time, and the requests until each
has its message are counted. The baseline polls as earlier versions did, in about twenty lines below: every
rank polls its key 20 times a second, and every half second the status of every rank in two requests; a rank
that gives up does the latter twice. Beyond `--baseline-up-to` ranks these are more requests than two cores
can answer. For each connection torch asks the machine's resolver for a name: where that takes long, run this
where there is none (`unshare --net`, with the loopback interface up).

Claim: requests per rank do not grow with the number of ranks.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import signal
import sys
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torch.distributed import PrefixStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage] - documented

from accel_state.hang_monitor import HangMonitor
from accel_train.checkpoint.agreement import StoreAllGather

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

PROCESSES = 8
FORK: Any = multiprocessing.get_context("fork")
POLL_S, SNAPSHOT_S = 0.05, 0.5  # of the baseline
STALL = RuntimeError(
    "[/gloo/transport/tcp/unbound_buffer.cc:129] Timed out waiting 8000ms for send operation"
)
GROWTH = 3.0  # of the requests per rank from the fewest to the most ranks that the claim allows


def counted(name: str) -> Callable[..., Any]:
    """Make a method that counts, and does what the inner store does."""

    def request(self: CountingStore, *args: Any) -> Any:
        self.requests += 1
        return getattr(self.inner, name)(*args)

    return request


class CountingStore(Store):
    """A connection that counts requests."""

    def __init__(self, inner: Store) -> None:
        super().__init__()
        self.inner = inner
        self.requests = 0

    set = counted("set")
    get = counted("get")
    add = counted("add")
    check = counted("check")
    compare_set = counted("compare_set")
    multi_get = counted("multi_get")
    deleteKey = counted("delete_key")  # noqa: N815 - so torch calls it

    def has_extended_api(self) -> bool:
        """As TCPStore."""
        return True


class Rank:
    """One simulated rank."""

    def __init__(self, port: int, rank: int, world_size: int, *, baseline: bool) -> None:
        connection = TCPStore("127.0.0.1", port, None, False, timedelta(seconds=120))  # noqa: FBT003 - no keywords
        self.store = CountingStore(connection)
        self.rank, self.world_size, self.baseline = rank, world_size, baseline
        self.monitor = HangMonitor(self.store, rank=rank, world_size=world_size, limit=1800.0)
        self.monitor.start()

    def agree(self, delay: float) -> None:
        """Agree about a checkpoint after some time."""
        time.sleep(delay)
        if self.baseline:
            self._agree_as_earlier()
            return
        agreement = StoreAllGather(
            self.store,
            rank=self.rank,
            world_size=self.world_size,
            channel="writer",
            in_main_thread=False,
            monitor=lambda: self.monitor,
        )
        texts = agreement.exchange("save_state()", f"{self.rank}")
        assert texts == [f"{rank}" for rank in range(self.world_size)]

    def give_up(self) -> None:
        """Make the message for a collective that has stalled."""
        if self.baseline:
            for _ in range(2):
                self._snapshot()
        else:
            assert "did not complete" in self.monitor.on_timeout("backward", STALL)

    def _agree_as_earlier(self) -> None:
        store = PrefixStore("earlier", self.store)
        keys = [f"{rank}" for rank in range(self.world_size)]
        store.set(keys[self.rank], "here")
        surveyed = time.monotonic()
        while not store.check(keys if self.rank == 0 else ["all"]):
            time.sleep(POLL_S)
            if time.monotonic() - surveyed >= SNAPSHOT_S:
                self._snapshot()
                surveyed = time.monotonic()
        if self.rank == 0:
            store.set("all", "here")

    def _snapshot(self) -> None:
        statuses = PrefixStore("accel/hang_monitor", self.store)
        for rank in range(self.world_size):
            if statuses.check([f"{rank}"]):
                statuses.get(f"{rank}")


def keep_store(pipe: Connection) -> None:
    """Be the process that keeps the store."""
    store = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=120), wait_for_workers=False)  # noqa: FBT003
    pipe.send(store.port)
    signal.pause()


def simulate(asked: Connection, port: int, ranks: range, world_size: int, baseline: bool) -> None:
    """Be some ranks: answer every scenario with the sum of their requests."""
    logging.disable()
    mine = [Rank(port, rank, world_size, baseline=baseline) for rank in ranks]
    asked.send("ready")
    while True:
        scenario, seconds = asked.recv()
        before = sum(rank.store.requests for rank in mine)
        if scenario == "slow writer":
            delays = [seconds if rank.rank == world_size - 1 else 0.0 for rank in mine]
            threads = [
                threading.Thread(target=rank.agree, args=(delay,), daemon=True)
                for rank, delay in zip(mine, delays, strict=True)
            ]
        else:
            threads = [threading.Thread(target=rank.give_up, daemon=True) for rank in mine]
        for thread in threads:
            thread.start()
        if scenario == "slow writer":
            time.sleep(seconds)
        else:
            for thread in threads:
                thread.join()
        asked.send(sum(rank.store.requests for rank in mine) - before)
        if not baseline:
            for thread in threads:
                thread.join()


def measure(world_size: int, seconds: float, *, baseline: bool) -> tuple[float, float]:
    """Requests per rank and second with a slow writer, and per rank in a stall."""
    share = world_size // PROCESSES
    pipe, store = start(keep_store)
    port = pipe.recv()
    started = [
        start(simulate, port, range(i * share, (i + 1) * share), world_size, baseline)
        for i in range(PROCESSES)
    ]

    def ask(*what: object) -> int:
        for connection, _ in started:
            connection.send(what)
        return sum(connection.recv() for connection, _ in started)

    try:
        for connection, _ in started:
            connection.recv()
        return ask("slow writer", seconds) / world_size / seconds, ask("stall", 0.0) / world_size
    finally:
        for process in (*(process for _, process in started), store):
            process.kill()
            process.join()


def start(body: Callable[..., None], *arguments: object) -> tuple[Connection, Any]:
    """Fork a process, which has torch already, and return the connection to it. This one has no threads."""
    ours, theirs = FORK.Pipe()
    process = FORK.Process(target=body, args=(theirs, *arguments), daemon=True)
    process.start()
    theirs.close()
    return ours, process


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[16, 64, 256, 1024, 2048])
    parser.add_argument("--baseline-up-to", type=int, default=64, metavar="RANKS")
    parser.add_argument("--seconds", type=float, default=8.0, help="how late one rank is")
    arguments = parser.parse_args()
    print(f"{'ranks':>6} {'slow writer, requests per rank and second':>45} {'stall, requests per rank':>40}")
    print(f"{'':>6} {'before':>15} {'after':>15} {'ratio':>13} {'before':>12} {'after':>12} {'ratio':>14}")
    found: list[tuple[float, float]] = []
    for world_size in arguments.ranks:
        found.append(measure(world_size, arguments.seconds, baseline=False))
        after = found[-1]
        before = (float("nan"), float("nan"))
        if world_size <= arguments.baseline_up_to:
            before = measure(world_size, arguments.seconds, baseline=True)
        cells = [(b, a, b / a) for b, a in zip(before, after, strict=True)]
        print(
            f"{world_size:>6} {cells[0][0]:>15.1f} {cells[0][1]:>15.2f} {cells[0][2]:>13.1f} "
            f"{cells[1][0]:>12.1f} {cells[1][1]:>12.2f} {cells[1][2]:>14.1f}",
            flush=True,
        )
    if any(last > GROWTH * one for one, last in zip(found[0], found[-1], strict=True)):
        sys.exit("claim missed: requests per rank grow with the number of ranks")


if __name__ == "__main__":
    main()
