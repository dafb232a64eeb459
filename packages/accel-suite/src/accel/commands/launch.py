"""Names under the path by which users of Accelerate import them.

Written by tools/gen_exports.py from api.toml and aliases.toml; change it there.
"""

# fmt: off
from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from accel_state._lazy import attach

if TYPE_CHECKING:
    from accel_cli.launch.parser import launch_command, launch_command_parser

__all__ = ["launch_command", "launch_command_parser"]

_EXPORTS = {
    **dict.fromkeys((
        "_validate_launch_command", "launch_command", "launch_command_parser",
    ), "accel_cli.launch.parser"),
}
__getattr__, __dir__ = attach(__name__, _EXPORTS)

if __name__ == "__main__":
    from accel_cli.main import main

    sys.exit(main(["launch", *sys.argv[1:]]))
