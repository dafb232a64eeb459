"""`python -m accel.commands.env` is `accel env`."""

from __future__ import annotations

import sys

from accel_cli.main import main

if __name__ == "__main__":
    sys.exit(main(["env", *sys.argv[1:]]))
