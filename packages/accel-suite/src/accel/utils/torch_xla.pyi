# fmt: off
from accel_cli.commands.tpu import install_xla as install_xla
