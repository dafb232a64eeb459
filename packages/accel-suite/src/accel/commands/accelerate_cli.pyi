# fmt: off
from accel_cli.main import main as main
