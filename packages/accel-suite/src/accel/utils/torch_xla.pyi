# fmt: off
from accel_cli.install_xla import install_xla as install_xla
