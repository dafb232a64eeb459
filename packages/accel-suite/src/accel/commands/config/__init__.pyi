# fmt: off
from accel.commands.config import config as config, config_args as config_args, default as default
from accel_cli.commands.config import write_basic_config as write_basic_config
from accel_cli.programs import (
    default_config_file as default_config_file, default_yaml_config_file as default_yaml_config_file,
    load_config_from_file as load_config_from_file,
)
def main() -> int: ...
