# fmt: off
from accel_cli.programs import (
    convert_config_to_fsdp2 as convert_config_to_fsdp2, to_fsdp2_command as to_fsdp2_command,
    to_fsdp2_command_parser as to_fsdp2_command_parser,
)
def main() -> int: ...
