"""Names under the path by which users of Accelerate import them. Written by tools/gen_exports.py."""

import sys
from importlib import import_module

from accel_state._lazy import attach

attach(__name__)


def main() -> int:
    """Run `accel estimate-memory` with the arguments of the process, as the script of this name does."""
    return import_module("accel_cli.main").main(["estimate-memory", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
