"""`python -m accel.commands.launch` is `accel launch`."""

from __future__ import annotations

import sys

from accel_cli.main import main

if __name__ == "__main__":
    sys.exit(main(["launch", *sys.argv[1:]]))
