# fmt: off
from accel_ops.weights.layout import (
    MODEL_NAME as MODEL_NAME, SAFE_MODEL_NAME as SAFE_MODEL_NAME, SAFE_WEIGHTS_NAME as SAFE_WEIGHTS_NAME,
    WEIGHTS_NAME as WEIGHTS_NAME,
)
from accel_train.checkpoint.layout import (
    OPTIMIZER_NAME as OPTIMIZER_NAME, RNG_STATE_NAME as RNG_STATE_NAME, SAMPLER_NAME as SAMPLER_NAME,
    SCALER_NAME as SCALER_NAME, SCHEDULER_NAME as SCHEDULER_NAME,
)
from accel_train.checkpoint.single_files import (
    load_accelerator_state as load_accelerator_state, load_custom_state as load_custom_state,
    save_accelerator_state as save_accelerator_state, save_custom_state as save_custom_state,
)
