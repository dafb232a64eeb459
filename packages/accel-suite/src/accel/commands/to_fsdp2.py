"""`python -m accel.commands.to_fsdp2` is `accel to-fsdp2`."""

from __future__ import annotations

import sys

from accel_cli.main import main

if __name__ == "__main__":
    sys.exit(main(["to-fsdp2", *sys.argv[1:]]))
