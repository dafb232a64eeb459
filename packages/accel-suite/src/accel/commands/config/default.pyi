# fmt: off
from accel_cli.config.basic import write_basic_config as write_basic_config
