# fmt: off
from accel_cli.programs import SageMakerConfig as SageMakerConfig
