# fmt: off
from accel_cli.programs import (
    launch_command as launch_command, launch_command_parser as launch_command_parser,
)
def main() -> int: ...
