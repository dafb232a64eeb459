"""Sharded models and their checkpoints.

Written by tools/gen_exports.py from api.toml and aliases.toml; change it there.
"""

# fmt: off
from __future__ import annotations

from typing import TYPE_CHECKING

from accel_state._lazy import attach

if TYPE_CHECKING:
    from accel_ops.weights.names import SAFE_WEIGHTS_NAME, WEIGHTS_NAME
    from accel_plugins.fsdp.autowrap import fsdp2_prepare_auto_wrap_policy
    from accel_plugins.fsdp.env_flags import (
        disable_fsdp_ram_efficient_loading, enable_fsdp_ram_efficient_loading,
    )
    from accel_plugins.fsdp.loading import ensure_weights_retied, get_parameters_from_modules
    from accel_plugins.precision.sharded_scaler import get_fsdp2_grad_scaler
    from accel_train.checkpoint.fsdp_files import (
        load_fsdp_model, load_fsdp_optimizer, save_fsdp_model, save_fsdp_optimizer,
    )
    from accel_train.checkpoint.layout import FSDP_MODEL_NAME, OPTIMIZER_NAME
    from accel_train.checkpoint.merge import merge_fsdp_weights
    from accel_train.fsdp import (
        fsdp2_apply_ac, fsdp2_canonicalize_names, fsdp2_load_full_state_dict, fsdp2_prepare_model,
        fsdp2_switch_optimizer_parameters,
    )

__all__ = [
    "FSDP_MODEL_NAME", "OPTIMIZER_NAME", "SAFE_WEIGHTS_NAME", "WEIGHTS_NAME",
    "disable_fsdp_ram_efficient_loading", "enable_fsdp_ram_efficient_loading", "ensure_weights_retied",
    "fsdp2_apply_ac", "fsdp2_canonicalize_names", "fsdp2_load_full_state_dict",
    "fsdp2_prepare_auto_wrap_policy", "fsdp2_prepare_model", "fsdp2_switch_optimizer_parameters",
    "get_fsdp2_grad_scaler", "get_parameters_from_modules", "load_fsdp_model", "load_fsdp_optimizer",
    "merge_fsdp_weights", "save_fsdp_model", "save_fsdp_optimizer",
]

_EXPORTS = {
    **dict.fromkeys(("SAFE_WEIGHTS_NAME", "WEIGHTS_NAME"), "accel_ops.weights.names"),
    **dict.fromkeys(("fsdp2_prepare_auto_wrap_policy",), "accel_plugins.fsdp.autowrap"),
    **dict.fromkeys((
        "disable_fsdp_ram_efficient_loading", "enable_fsdp_ram_efficient_loading",
    ), "accel_plugins.fsdp.env_flags"),
    **dict.fromkeys(("ensure_weights_retied", "get_parameters_from_modules"), "accel_plugins.fsdp.loading"),
    **dict.fromkeys(("get_fsdp2_grad_scaler",), "accel_plugins.precision.sharded_scaler"),
    **dict.fromkeys((
        "load_fsdp_model", "load_fsdp_optimizer", "save_fsdp_model", "save_fsdp_optimizer",
    ), "accel_train.checkpoint.fsdp_files"),
    **dict.fromkeys(("FSDP_MODEL_NAME", "OPTIMIZER_NAME"), "accel_train.checkpoint.layout"),
    **dict.fromkeys(("merge_fsdp_weights",), "accel_train.checkpoint.merge"),
    **dict.fromkeys((
        "fsdp2_apply_ac", "fsdp2_canonicalize_names", "fsdp2_load_full_state_dict", "fsdp2_prepare_model",
        "fsdp2_switch_optimizer_parameters",
    ), "accel_train.fsdp"),
}
__getattr__, __dir__ = attach(__name__, _EXPORTS)
