"""`python -m accel.commands.estimate` is `accel estimate-memory`."""

from __future__ import annotations

import sys

from accel_cli.main import main

if __name__ == "__main__":
    sys.exit(main(["estimate-memory", *sys.argv[1:]]))
