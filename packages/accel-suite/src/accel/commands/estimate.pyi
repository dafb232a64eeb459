# fmt: off
from accel_cli.programs import (
    estimate_command as estimate_command, estimate_command_parser as estimate_command_parser,
)
def main() -> int: ...
