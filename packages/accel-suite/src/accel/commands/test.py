"""`python -m accel.commands.test` is `accel test`."""

from __future__ import annotations

import sys

from accel_cli.main import main

if __name__ == "__main__":
    sys.exit(main(["test", *sys.argv[1:]]))
