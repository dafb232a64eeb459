# fmt: off
from accel_cli.programs import (
    default_config_file as default_config_file, default_yaml_config_file as default_yaml_config_file,
    load_config_from_file as load_config_from_file,
)
