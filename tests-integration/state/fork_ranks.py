"""Run scripts on several ranks each, all forked from one process: `fork_ranks.py PROGRAMS`.

PROGRAMS is a JSON file: `[{"script": ..., "world_size": ..., "port": ...}, ...]`. torch is imported once for
all. The ranks see what torchrun's workers see, end as any script does, and leave `RANK.code`, `RANK.out` and
`RANK.err` behind in the folder of their script. All scripts run at the same time.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path

import accel_state.partial_state  # noqa: F401 - imported once, before the ranks are forked


def main(programs: list[dict[str, str | int]]) -> None:
    """Start all ranks of all programs and wait for them; in a rank, return when its script has run."""
    ranks: dict[int, Path] = {}
    for program in programs:
        script, world_size = Path(str(program["script"])), int(program["world_size"])
        for rank in range(world_size):
            pid = os.fork()
            if pid == 0:
                be_rank(rank, world_size, int(program["port"]), script)
                return
            ranks[pid] = script.parent / f"{rank}.code"
    for pid, code in ranks.items():
        code.write_text(str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])))


def be_rank(rank: int, world_size: int, port: int, script: Path) -> None:
    """Run the script as torchrun would."""
    os.chdir(script.parent)
    for name, descriptor in (("out", 1), ("err", 2)):
        file = os.open(f"{rank}.{name}", os.O_WRONLY | os.O_CREAT)
        os.dup2(file, descriptor)
        os.close(file)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        OMP_NUM_THREADS="1",
    )
    sys.argv = [str(script)]
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
