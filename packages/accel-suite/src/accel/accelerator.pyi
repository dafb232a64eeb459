# fmt: off
from accel_ops.weights.layout import (
    MODEL_NAME as MODEL_NAME, SAFE_WEIGHTS_INDEX_NAME as SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME as SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_PATTERN_NAME as SAFE_WEIGHTS_PATTERN_NAME,
    WEIGHTS_INDEX_NAME as WEIGHTS_INDEX_NAME, WEIGHTS_NAME as WEIGHTS_NAME,
    WEIGHTS_PATTERN_NAME as WEIGHTS_PATTERN_NAME,
)
from accel_train.accelerator import Accelerator as Accelerator
from accel_train.checkpoint.layout import SCALER_NAME as SCALER_NAME
from accel_train.profiling import PROFILE_PATTERN_NAME as PROFILE_PATTERN_NAME
