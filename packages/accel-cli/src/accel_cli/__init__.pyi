from accel_cli.main import COMMANDS as COMMANDS
from accel_cli.main import Command as Command
