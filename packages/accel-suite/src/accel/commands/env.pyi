# fmt: off
from accel_cli.command_functions import env_command as env_command, env_command_parser as env_command_parser
