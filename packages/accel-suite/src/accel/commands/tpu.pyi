# fmt: off
from accel_cli.programs import (
    tpu_command_launcher as tpu_command_launcher, tpu_command_parser as tpu_command_parser,
)
def main() -> int: ...
