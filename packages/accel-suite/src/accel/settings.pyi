# fmt: off
from accel_state.settings.environ import from_environ as from_environ, to_environ as to_environ
from accel_state.settings.model import Settings as Settings
from accel_state.settings.sections.deepspeed import DeepSpeedSettings as DeepSpeedSettings
from accel_state.settings.sections.fp8 import Fp8Settings as Fp8Settings
from accel_state.settings.sections.fsdp import FsdpSettings as FsdpSettings
from accel_state.settings.sections.launch import LaunchSettings as LaunchSettings
from accel_state.settings.sections.megatron import MegatronSettings as MegatronSettings
from accel_state.settings.sections.parallelism import ParallelismSettings as ParallelismSettings
from accel_state.settings.sections.process import ProcessSettings as ProcessSettings
from accel_state.settings.sections.training import (
    DynamoSettings as DynamoSettings, PrecisionSettings as PrecisionSettings,
    TrainingSettings as TrainingSettings,
)
