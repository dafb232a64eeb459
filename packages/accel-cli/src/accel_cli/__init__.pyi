from accel_cli.main import COMMANDS as COMMANDS
from accel_cli.main import Subcommand as Subcommand
