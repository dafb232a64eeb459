"""Names under the path by which users of Accelerate import them.

Written by tools/gen_exports.py from api.toml and aliases.toml; change it there.
"""

# fmt: off
from __future__ import annotations

from typing import TYPE_CHECKING

from accel_state._lazy import attach

if TYPE_CHECKING:
    from accel_bigmodel.hooks.layerwise import SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING
    from accel_cli.launch.namespace import TORCH_LAUNCH_PARAMS
    from accel_ops.weights.names import (
        MODEL_NAME, SAFE_MODEL_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_PATTERN_NAME,
        WEIGHTS_INDEX_NAME, WEIGHTS_NAME, WEIGHTS_PATTERN_NAME,
    )
    from accel_state.labels import TORCH_DISTRIBUTED_OPERATION_TYPES
    from accel_state.settings.rows.fsdp import (
        FSDP2_STATE_DICT_TYPE, FSDP_AUTO_WRAP_POLICY, FSDP_BACKWARD_PREFETCH, FSDP_SHARDING_STRATEGY,
        FSDP_STATE_DICT_TYPE,
    )
    from accel_state.versions import (
        BETA_CP_AVAILABLE_PYTORCH_VERSION, BETA_SP_AVAILABLE_DEEPSPEED_VERSION,
        BETA_TP_AVAILABLE_PYTORCH_VERSION, BETA_TP_AVAILABLE_TRANSFORMERS_VERSION,
        MITA_PROFILING_AVAILABLE_PYTORCH_VERSION, XPU_PROFILING_AVAILABLE_PYTORCH_VERSION,
    )
    from accel_train.checkpoint.layout import (
        FSDP_MODEL_NAME, OPTIMIZER_NAME, RNG_STATE_NAME, SAMPLER_NAME, SCALER_NAME, SCHEDULER_NAME,
    )
    from accel_train.launchers import ELASTIC_LOG_LINE_PREFIX_TEMPLATE_PYTORCH_VERSION
    from accel_train.profiling import PROFILE_PATTERN_NAME

__all__ = [
    "BETA_CP_AVAILABLE_PYTORCH_VERSION", "BETA_SP_AVAILABLE_DEEPSPEED_VERSION",
    "BETA_TP_AVAILABLE_PYTORCH_VERSION", "BETA_TP_AVAILABLE_TRANSFORMERS_VERSION",
    "ELASTIC_LOG_LINE_PREFIX_TEMPLATE_PYTORCH_VERSION", "FSDP2_STATE_DICT_TYPE", "FSDP_AUTO_WRAP_POLICY",
    "FSDP_BACKWARD_PREFETCH", "FSDP_MODEL_NAME", "FSDP_SHARDING_STRATEGY", "FSDP_STATE_DICT_TYPE",
    "MITA_PROFILING_AVAILABLE_PYTORCH_VERSION", "MODEL_NAME", "OPTIMIZER_NAME", "PROFILE_PATTERN_NAME",
    "RNG_STATE_NAME", "SAFE_MODEL_NAME", "SAFE_WEIGHTS_INDEX_NAME", "SAFE_WEIGHTS_NAME",
    "SAFE_WEIGHTS_PATTERN_NAME", "SAMPLER_NAME", "SCALER_NAME", "SCHEDULER_NAME",
    "SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING", "TORCH_DISTRIBUTED_OPERATION_TYPES", "TORCH_LAUNCH_PARAMS",
    "WEIGHTS_INDEX_NAME", "WEIGHTS_NAME", "WEIGHTS_PATTERN_NAME", "XPU_PROFILING_AVAILABLE_PYTORCH_VERSION",
]

_EXPORTS = {
    **dict.fromkeys(("SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING",), "accel_bigmodel.hooks.layerwise"),
    **dict.fromkeys(("TORCH_LAUNCH_PARAMS",), "accel_cli.launch.namespace"),
    **dict.fromkeys((
        "MODEL_NAME", "SAFE_MODEL_NAME", "SAFE_WEIGHTS_INDEX_NAME", "SAFE_WEIGHTS_NAME",
        "SAFE_WEIGHTS_PATTERN_NAME", "WEIGHTS_INDEX_NAME", "WEIGHTS_NAME", "WEIGHTS_PATTERN_NAME",
    ), "accel_ops.weights.names"),
    **dict.fromkeys(("TORCH_DISTRIBUTED_OPERATION_TYPES",), "accel_state.labels"),
    **dict.fromkeys((
        "FSDP2_STATE_DICT_TYPE", "FSDP_AUTO_WRAP_POLICY", "FSDP_BACKWARD_PREFETCH",
        "FSDP_SHARDING_STRATEGY", "FSDP_STATE_DICT_TYPE",
    ), "accel_state.settings.rows.fsdp"),
    **dict.fromkeys((
        "BETA_CP_AVAILABLE_PYTORCH_VERSION", "BETA_SP_AVAILABLE_DEEPSPEED_VERSION",
        "BETA_TP_AVAILABLE_PYTORCH_VERSION", "BETA_TP_AVAILABLE_TRANSFORMERS_VERSION",
        "MITA_PROFILING_AVAILABLE_PYTORCH_VERSION", "XPU_PROFILING_AVAILABLE_PYTORCH_VERSION",
    ), "accel_state.versions"),
    **dict.fromkeys((
        "FSDP_MODEL_NAME", "OPTIMIZER_NAME", "RNG_STATE_NAME", "SAMPLER_NAME", "SCALER_NAME",
        "SCHEDULER_NAME",
    ), "accel_train.checkpoint.layout"),
    **dict.fromkeys(("ELASTIC_LOG_LINE_PREFIX_TEMPLATE_PYTORCH_VERSION",), "accel_train.launchers"),
    **dict.fromkeys(("PROFILE_PATTERN_NAME",), "accel_train.profiling"),
}
__getattr__, __dir__ = attach(__name__, _EXPORTS)
