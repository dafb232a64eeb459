"""Run the programs of the table with one library; started by `compare_behaviour.py`, once per process.

    python tools/behaviour/runner.py PACKAGE WORLD RANK PORT OUT [PATTERN]

Only torch and the library are needed. Every program begins with fresh states, seeds, environment and folder.
Several processes end every program together, whatever became of it, and a failed collective ends in seconds.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import os
import random
import shutil
import sys
import tempfile
import time
import warnings
from datetime import timedelta
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from cases import CASES, Case
from outcomes import failure_of, outcome_of

TABLES = ("loaders", "samplers", "training", "collectives", "bigmodel", "settings", "signatures")
MODULES = (
    "state", "utils", "data_loader", "hooks", "big_modeling", "scheduler", "optimizer", "logging",
    "local_sgd",
)  # fmt: skip
COLLECTIVE_TIMEOUT = timedelta(seconds=20)
SLOW = 5.0
STORE_TIMEOUT = timedelta(seconds=120)


def main() -> None:
    """Run what the command line says, and write what was found."""
    package, world, rank, port, out = sys.argv[1], *map(int, sys.argv[2:5]), Path(sys.argv[5])
    pattern = sys.argv[6] if len(sys.argv) > 6 else "*"
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    library = importlib.import_module(package)
    for module in MODULES:
        importlib.import_module(f"{package}.{module}")
    for table in TABLES:
        importlib.import_module(table)
    meet = _meet(world, rank, port)
    found: dict[str, Any] = {}
    for name, case in CASES.items():
        if world in case.worlds and fnmatchcase(name, pattern.replace("[", "[[]")):
            began = time.monotonic()
            found[name] = run(case, library)
            meet(name)
            if (took := time.monotonic() - began) > SLOW:
                print(f"{name}: {took:.1f} s", file=sys.stderr, flush=True)
    out.write_text(json.dumps(found))


def run(case: Case, library: Any) -> Any:
    """Run one program; return what it found, or how it failed."""
    before, home = dict(os.environ), Path.cwd()
    folder = Path(tempfile.mkdtemp(prefix="behaviour"))
    os.chdir(folder)
    _fresh(library, alone=case.worlds == (1,) or "RANK" not in os.environ)
    try:
        with Path(os.devnull).open("w") as null, contextlib.redirect_stdout(null):
            return outcome_of(case.program(library, **case.arguments))
    except (Exception, SystemExit) as error:  # noqa: BLE001 - what a program raises is what it found
        return failure_of(error)
    finally:
        os.chdir(home)
        shutil.rmtree(folder, ignore_errors=True)
        os.environ.clear()
        os.environ.update(before)


def _fresh(library: Any, *, alone: bool) -> None:
    library.state.AcceleratorState._reset_state(alone)  # ranks keep the group that they are in
    library.state.GradientState._reset_state()
    random.seed(0)
    torch.manual_seed(0)


def _meet(world: int, rank: int, port: int) -> Any:
    """Start the process group, and return what lets all ranks wait for each other outside of it."""
    if world == 1:
        return str  # nobody to wait for
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), ACCELERATE_USE_CPU="true", OMP_NUM_THREADS="1",
    )  # fmt: skip
    store = dist.TCPStore("127.0.0.1", port, world, rank == 0, timeout=STORE_TIMEOUT)
    group_store = dist.PrefixStore("group", store)
    dist.init_process_group(
        "gloo", store=group_store, rank=rank, world_size=world, timeout=COLLECTIVE_TIMEOUT
    )

    # A connection of its own: one that waits would hold up the threads of the library that use the group's.
    ends = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=STORE_TIMEOUT)

    def meet(name: str) -> None:
        ends.set(f"{name}/{rank}", "done")
        ends.wait([f"{name}/{index}" for index in range(world)])

    return meet


if __name__ == "__main__":
    main()
