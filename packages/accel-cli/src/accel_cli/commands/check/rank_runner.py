"""Start the processes that run as ranks, and read their records."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from accel_cli.commands.check.trace import Order, Record

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

WORKER = "accel_cli.commands.check.rank_worker"

DIVIDES = sys.platform == "linux"
"""Whether one process imports common modules and forks the ranks; on other systems, whose libraries do not
survive a fork, every rank is spawned."""


def play(orders: Sequence[Order], variables: Mapping[str, str], *, timeout: int) -> list[Record]:
    """Run the script as selected ranks, each in its own process."""
    at_once = os.cpu_count() or 1
    with tempfile.TemporaryDirectory(prefix="accel-check-") as folder:
        with_files = [replace(order, output=str(Path(folder) / f"{order.rank}.record")) for order in orders]
        groups = [with_files] if DIVIDES else [[order] for order in with_files]
        with ThreadPoolExecutor(at_once) as pool:
            output = pool.map(lambda group: _run(group, variables, timeout=timeout, at_once=at_once), groups)
            sayings = [one for group, one in zip(groups, output, strict=True) for _ in group]
        return [_record(order, saying) for order, saying in zip(with_files, sayings, strict=True)]


def _run(orders: Sequence[Order], variables: Mapping[str, str], *, timeout: int, at_once: int) -> str:
    """Run one process for all ranks; return the reason for ranks without a record."""
    path = Path(orders[0].output).with_suffix(".orders")
    path.write_bytes(pickle.dumps((orders, timeout, at_once)))
    environment = orders[0].environment if len(orders) == 1 else {}
    try:
        done = subprocess.run(
            [sys.executable, "-m", WORKER, str(path)],
            env={**variables, **environment},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=None if len(orders) > 1 else timeout,
        )
    except subprocess.TimeoutExpired:
        return too_long(timeout)
    return ended(done.returncode, done.stderr)


def _record(order: Order, saying: str) -> Record:
    path = Path(order.output)
    if not path.is_file():
        return Record(rank=order.rank, stopped=saying)
    return pickle.loads(path.read_bytes())  # noqa: S301 - a worker of ours wrote it


def too_long(timeout: int) -> str:
    """Return the reason of a rank that was stopped at the timeout."""
    return (
        f"it has not ended after {timeout} s (--timeout); values are made up, so that a loop that waits for"
        " one may never end"
    )


def ended(code: int, output: str) -> str:
    """Return the reason of a rank whose process has exited without a record."""
    lines = output.strip().splitlines() or ["nothing was said"]
    return f"it ended with exit code {code}: {lines[-1]}"
