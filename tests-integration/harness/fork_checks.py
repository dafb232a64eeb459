"""Run `accel check`, or `accel doctor`, several times, all forked from one process: `fork_checks.py JOBS`.

JOBS is a JSON file: `{"NAME": {"folder": ..., "words": ["check", ...]}, ...}`. torch is imported once. Each
check runs in its folder and leaves there what it prints, as `out` and `err`, and its exit code, as `code`.
Its ranks are forked from it, as those of several ranks are from the process that the command starts.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import transformers.modeling_utils  # noqa: F401  # pyright: ignore[reportUnusedImport] - for all checks

from accel_cli.main import main as accel
from accel_inspect.check import rank_worker, record

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from accel_inspect.check.record import RankTask


def conduct_forked(
    orders: Sequence[RankTask], variables: Mapping[str, str], *, timeout: int, at_once: int, worker: str
) -> str:
    """Fork the ranks from the current process, which has imported torch."""
    os.environ.update(variables)
    rank_worker.import_often_needed(Path(orders[0].script))
    if worker == record.WORKER:
        rank_worker.fork_ranks(orders, timeout=timeout, at_once=at_once)
    else:
        import_module(worker).run_tasks(orders, timeout=timeout, at_once=at_once)
    return "a rank has left no record"


def main(jobs: dict[str, dict[str, Any]]) -> None:
    """Run all checks, one after the other."""
    record._run = conduct_forked
    for job in jobs.values():
        pid = os.fork()
        if pid == 0:
            os.chdir(job["folder"])
            for name, descriptor in (("out", 1), ("err", 2)):
                os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT), descriptor)
            code = 1
            try:
                code = accel(job["words"])
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        Path(job["folder"], "code").write_text(str(code))


rank_worker.import_often_needed(Path(__file__))
gc.freeze()  # else each process, when it ends, looks through all that was imported, and so copies it

if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
