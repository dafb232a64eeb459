# fmt: off
# pyright: reportPrivateUsage=false
from accel_cli.programs import (
    _validate_launch_command as _validate_launch_command, launch_command as launch_command,
    launch_command_parser as launch_command_parser,
)
def main() -> int: ...
