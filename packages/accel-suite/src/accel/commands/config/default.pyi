# fmt: off
from accel_cli.commands.config import write_basic_config as write_basic_config
