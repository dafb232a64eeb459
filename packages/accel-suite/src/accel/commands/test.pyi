# fmt: off
from accel_cli.command_functions import (
    test_command as test_command, test_command_parser as test_command_parser,
)
def main() -> int: ...
