"""Run scripts on several ranks each, all forked from one process: `fork_ranks.py PROGRAMS [MODULE ...]`.

PROGRAMS is a JSON file: `[{"script": ..., "world_size": ..., "variables": ...}, ...]`, where `{rank}` in the
value of a variable stands for the rank. torch and every MODULE are imported once for all. The ranks end as
any script does, and leave `RANK.code`, `RANK.out` and `RANK.err` behind in the folder of their script. All
run at the same time.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

for module in ("accel_state.partial_state", *sys.argv[2:]):  # once, before the ranks are forked
    import_module(module)
gc.freeze()  # or each rank, when it ends, looks through all that was imported, and so copies it: up to 1 s


def main(programs: list[dict[str, Any]]) -> None:
    """Start all ranks of all programs and wait for them; in a rank, return when its script has run."""
    ranks: dict[int, Path] = {}
    for program in programs:
        script = Path(program["script"])
        for rank in range(program["world_size"]):
            pid = os.fork()
            if pid == 0:
                be_rank(rank, program["variables"], script)
                return
            ranks[pid] = script.parent / f"{rank}.code"
    for pid, code in ranks.items():
        code.write_text(str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])))


def be_rank(rank: int, variables: dict[str, str], script: Path) -> None:
    """Run the script as its launcher would."""
    os.chdir(script.parent)
    for name, descriptor in (("out", 1), ("err", 2)):
        file = os.open(f"{rank}.{name}", os.O_WRONLY | os.O_CREAT)
        os.dup2(file, descriptor)
        os.close(file)
    os.environ.update({name: value.format(rank=rank) for name, value in variables.items()})
    sys.argv = [str(script)]
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
