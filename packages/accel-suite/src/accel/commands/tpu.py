"""`python -m accel.commands.tpu` is `accel tpu-config`."""

from __future__ import annotations

import sys

from accel_cli.main import main

if __name__ == "__main__":
    sys.exit(main(["tpu-config", *sys.argv[1:]]))
