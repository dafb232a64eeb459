# fmt: off
from accel_cli.command_functions import (
    tpu_command_launcher as tpu_command_launcher, tpu_command_parser as tpu_command_parser,
)
def main() -> int: ...
