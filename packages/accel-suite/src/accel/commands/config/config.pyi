# fmt: off
from accel_cli.programs import (
    cache_dir as cache_dir, config_command as config_command, default_config_file as default_config_file,
    default_yaml_config_file as default_yaml_config_file, load_config_from_file as load_config_from_file,
)
