"""Run `accel check`, or `accel doctor`, several times, all forked from one process: `fork_checks.py JOBS`.

JOBS is a JSON file: `{"NAME": {"folder": ..., "words": ["check", ...]}, ...}`. torch is imported once. Each
check runs in its folder and leaves there what it prints, as `out` and `err`, and its exit code, as `code`.
Its ranks are forked from it, instead of from a process that the command starts.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import transformers.modeling_utils  # noqa: F401  # pyright: ignore[reportUnusedImport] - for all checks

from accel_cli.main import main as accel
from accel_inspect import trial


def main(jobs: dict[str, dict[str, Any]]) -> None:
    """Run all checks, one after the other."""
    trial.CONTEXT = multiprocessing.get_context("fork")
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


for module in ("torch._dynamo", "accel_inspect.check.rank_worker"):
    import_module(module)
gc.freeze()  # else each process, when it ends, looks through all that was imported, and so copies it

if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
