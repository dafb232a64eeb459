"""`python -m accel.commands.merge` is `accel merge-weights`."""

from __future__ import annotations

import sys

from accel_cli.main import main

if __name__ == "__main__":
    sys.exit(main(["merge-weights", *sys.argv[1:]]))
