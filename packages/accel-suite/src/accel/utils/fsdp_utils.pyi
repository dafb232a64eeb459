# fmt: off
from accel_ops.weights.layout import SAFE_WEIGHTS_NAME as SAFE_WEIGHTS_NAME, WEIGHTS_NAME as WEIGHTS_NAME
from accel_plugins.fsdp.blocks import (
    ensure_weights_retied as ensure_weights_retied,
    fsdp2_prepare_auto_wrap_policy as fsdp2_prepare_auto_wrap_policy,
    get_parameters_from_modules as get_parameters_from_modules,
)
from accel_plugins.fsdp.plugin import (
    disable_fsdp_ram_efficient_loading as disable_fsdp_ram_efficient_loading,
    enable_fsdp_ram_efficient_loading as enable_fsdp_ram_efficient_loading,
)
from accel_plugins.precision import get_fsdp2_grad_scaler as get_fsdp2_grad_scaler
from accel_train.checkpoint.layout import (
    FSDP_MODEL_NAME as FSDP_MODEL_NAME, OPTIMIZER_NAME as OPTIMIZER_NAME,
)
from accel_train.checkpoint.single_files import (
    load_fsdp_model as load_fsdp_model, load_fsdp_optimizer as load_fsdp_optimizer,
    merge_fsdp_weights as merge_fsdp_weights, save_fsdp_model as save_fsdp_model,
    save_fsdp_optimizer as save_fsdp_optimizer,
)
from accel_train.fsdp import (
    fsdp2_apply_ac as fsdp2_apply_ac, fsdp2_canonicalize_names as fsdp2_canonicalize_names,
    fsdp2_load_full_state_dict as fsdp2_load_full_state_dict, fsdp2_prepare_model as fsdp2_prepare_model,
    fsdp2_switch_optimizer_parameters as fsdp2_switch_optimizer_parameters,
)
