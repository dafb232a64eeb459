"""A launcher that starts the processes of this machine itself; run as a program, it is what starts them."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys

from accel_cli import Launcher, become
from accel_state.errors import SettingsError


def line(plan):
    processes = str(plan.local_processes)
    return [sys.executable, "-m", "accel_example.spawn", processes, plan.script, *plan.script_arguments]


def run(plan):
    if plan.num_machines > 1:
        raise SettingsError("example_spawn starts the processes of one machine.")
    return become(line(plan), plan.environ)


LAUNCHER = Launcher(
    name="example_spawn",
    explain="a program of a third party starts the processes of this machine",
    applies=lambda plan: plan.launch.launcher == "example_spawn",
    run=run,
    show=lambda plan: shlex.join(line(plan)),
    environ=lambda plan: {"EXAMPLE_PROCESSES": str(plan.local_processes)},
)


def main(count, *line):
    shared = {
        "WORLD_SIZE": count,
        "LOCAL_WORLD_SIZE": count,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": os.environ["EXAMPLE_PORT"],
    }
    started = [
        subprocess.Popen(
            [sys.executable, *line], env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        )
        for rank in range(int(count))
    ]
    return max(process.wait() for process in started)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
