# fmt: off
from accel_state.settings.engines import (
    DeepSpeedSettings as DeepSpeedSettings, Fp8Settings as Fp8Settings, FsdpSettings as FsdpSettings,
    MegatronSettings as MegatronSettings, ParallelismSettings as ParallelismSettings,
)
from accel_state.settings.model import (
    Settings as Settings, from_environ as from_environ, to_environ as to_environ,
)
from accel_state.settings.run import (
    DynamoSettings as DynamoSettings, LaunchSettings as LaunchSettings,
    PrecisionSettings as PrecisionSettings, ProcessSettings as ProcessSettings,
    TrainingSettings as TrainingSettings,
)
