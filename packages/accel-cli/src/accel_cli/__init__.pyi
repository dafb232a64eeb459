from accel_cli.launch.launchers import Launcher as Launcher
from accel_cli.launch.launchers import become as become
from accel_cli.main import COMMANDS as COMMANDS
from accel_cli.main import Subcommand as Subcommand
