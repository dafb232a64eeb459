# fmt: off
from accel_cli.command_functions import (
    merge_command as merge_command, merge_command_parser as merge_command_parser,
)
def main() -> int: ...
