# fmt: off
from accel_cli.programs import ClusterConfig as ClusterConfig
