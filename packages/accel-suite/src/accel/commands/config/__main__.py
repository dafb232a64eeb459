"""`python -m accel.commands.config` is `accel config`. Written by tools/gen_exports.py."""

import sys

if __name__ == "__main__":
    from accel_cli.main import main

    sys.exit(main(["config", *sys.argv[1:]]))
