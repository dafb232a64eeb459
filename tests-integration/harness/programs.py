"""Run several programs on several ranks each, as processes of their own, and tell how they ended."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import SystemRandom
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

FOLDER = Path(__file__).resolve().parent
TORCHRUN = {
    "RANK": "{rank}",
    "LOCAL_RANK": "{rank}",
    "WORLD_SIZE": "{world_size}",
    "LOCAL_WORLD_SIZE": "{world_size}",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "{port}",
    "OMP_NUM_THREADS": "1",
}


@dataclass(frozen=True)
class Program:
    """What the ranks run, and what their launcher tells them."""

    source: str
    world_size: int = 2
    variables: dict[str, str] = field(default_factory=lambda: TORCHRUN)


@dataclass(frozen=True)
class Ended:
    """How a rank ended."""

    code: int
    output: str
    errors: str


def _reserve_port() -> socket.socket:
    """Listen on a free port below those that the system gives away, since ranks listen on it much later."""
    while True:
        with suppress(OSError):
            return socket.create_server(("127.0.0.1", SystemRandom().randrange(10_000, 32_000)))


def run_programs(
    programs: dict[str, Program], base: Path, imports: Sequence[str] = (), run_by: Sequence[str] = ()
) -> dict[str, list[Ended]]:
    """Run all programs at the same time, forked from one process.

    Args:
        programs: What to run, by name.
        base: An empty folder; each program gets one of its own in it, named after it.
        imports: Modules that several programs import, imported once for all of them.
        run_by: What Python runs the program with that forks the ranks: `-m` and a module.

    Returns:
        For each program, how its ranks ended, in rank order.
    """
    jobs: list[dict[str, object]] = []
    with ExitStack() as ports:
        for name, program in programs.items():
            folder = base / name
            folder.mkdir()
            (folder / "program.py").write_text(program.source)
            port = ports.enter_context(_reserve_port()).getsockname()[1]
            known = {"rank": "{rank}", "world_size": program.world_size, "port": port, "folder": folder}
            variables = {key: value.format(**known) for key, value in program.variables.items()}
            script = str(folder / "program.py")
            jobs.append({"script": script, "world_size": program.world_size, "variables": variables})
    (base / "programs.json").write_text(json.dumps(jobs))
    done = subprocess.run(
        [sys.executable, *run_by, str(FOLDER / "fork_ranks.py"), str(base / "programs.json"), *imports],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},  # torch reads it once, before the ranks are forked
    )
    assert done.returncode == 0, done.stderr
    ends: dict[str, list[Ended]] = {}
    for name, program in programs.items():
        for rank in range(program.world_size):
            texts = ((base / name / f"{rank}.{suffix}").read_text() for suffix in ("code", "out", "err"))
            code, output, errors = texts
            own = errors.partition("nanobind: leaked")[
                0
            ]  # at the end, of what Triton has and is not collected
            ends.setdefault(name, []).append(Ended(int(code), output, own))
    return ends
