"""Become the script that a worker runs; see `accel_cli.launch.script_runner`.

torch.distributed.run starts this module once for every rank. It is the module `__main__`, and its names give
way to those of the script.
"""

from __future__ import annotations

import sys

from accel_cli.launch.script_runner import run

if __name__ == "__main__":
    run(sys.argv[1:])
