"""`python -m accel.commands.config` is `accel config`."""

from __future__ import annotations

import sys

from accel_cli.main import main

if __name__ == "__main__":
    sys.exit(main(["config", *sys.argv[1:]]))
