"""Names under the path by which users of Accelerate import them.

Written by tools/gen_exports.py from api.toml and aliases.toml; change it there.
"""

# fmt: off
from __future__ import annotations

from typing import TYPE_CHECKING

from accel_state._lazy import attach

if TYPE_CHECKING:
    from accel_bigmodel.device_map.budget import get_balanced_memory, get_max_memory
    from accel_bigmodel.device_map.check import check_device_map, check_tied_parameters_on_same_device
    from accel_bigmodel.device_map.clean import clean_device_map
    from accel_bigmodel.device_map.infer import infer_auto_device_map
    from accel_bigmodel.hooks.align import align_module_device, has_offloaded_params
    from accel_bigmodel.loading import load_checkpoint_in_model
    from accel_bigmodel.offload import load_offloaded_weights
    from accel_bigmodel.placement import set_module_tensor_to_device
    from accel_bigmodel.sizes import (
        calculate_maximum_sizes, compute_module_sizes, compute_module_total_buffer_size, get_max_layer_size,
        get_module_size_with_ties,
    )
    from accel_ops.names import is_peft_model
    from accel_ops.weights.names import SAFE_WEIGHTS_NAME, WEIGHTS_INDEX_NAME, WEIGHTS_NAME
    from accel_ops.weights.read import load_state_dict
    from accel_ops.weights.sizes import convert_file_size_to_int, dtype_byte_size
    from accel_ops.weights.tensors import (
        get_non_persistent_buffers, id_tensor_storage, named_module_tensors,
    )
    from accel_ops.weights.tied import (
        check_tied_parameters_in_config, find_tied_parameters, retie_parameters,
    )
    from accel_plugins.precision.contexts import get_grad_scaler, get_mixed_precision_context_manager
    from accel_train.checkpoint.offloaded import get_state_dict_offloaded_model

__all__ = [
    "SAFE_WEIGHTS_NAME", "WEIGHTS_INDEX_NAME", "WEIGHTS_NAME", "align_module_device",
    "calculate_maximum_sizes", "check_device_map", "check_tied_parameters_in_config",
    "check_tied_parameters_on_same_device", "clean_device_map", "compute_module_sizes",
    "compute_module_total_buffer_size", "convert_file_size_to_int", "dtype_byte_size",
    "find_tied_parameters", "get_balanced_memory", "get_grad_scaler", "get_max_layer_size",
    "get_max_memory", "get_mixed_precision_context_manager", "get_module_size_with_ties",
    "get_non_persistent_buffers", "get_state_dict_offloaded_model", "has_offloaded_params",
    "id_tensor_storage", "infer_auto_device_map", "is_peft_model", "load_checkpoint_in_model",
    "load_offloaded_weights", "load_state_dict", "named_module_tensors", "retie_parameters",
    "set_module_tensor_to_device",
]

_EXPORTS = {
    **dict.fromkeys(("get_balanced_memory", "get_max_memory"), "accel_bigmodel.device_map.budget"),
    **dict.fromkeys((
        "check_device_map", "check_tied_parameters_on_same_device",
    ), "accel_bigmodel.device_map.check"),
    **dict.fromkeys(("clean_device_map",), "accel_bigmodel.device_map.clean"),
    **dict.fromkeys(("infer_auto_device_map",), "accel_bigmodel.device_map.infer"),
    **dict.fromkeys(("align_module_device", "has_offloaded_params"), "accel_bigmodel.hooks.align"),
    **dict.fromkeys(("load_checkpoint_in_model",), "accel_bigmodel.loading"),
    **dict.fromkeys(("load_offloaded_weights",), "accel_bigmodel.offload"),
    **dict.fromkeys(("set_module_tensor_to_device",), "accel_bigmodel.placement"),
    **dict.fromkeys((
        "calculate_maximum_sizes", "compute_module_sizes", "compute_module_total_buffer_size",
        "get_max_layer_size", "get_module_size_with_ties",
    ), "accel_bigmodel.sizes"),
    **dict.fromkeys(("is_peft_model",), "accel_ops.names"),
    **dict.fromkeys(("SAFE_WEIGHTS_NAME", "WEIGHTS_INDEX_NAME", "WEIGHTS_NAME"), "accel_ops.weights.names"),
    **dict.fromkeys(("load_state_dict",), "accel_ops.weights.read"),
    **dict.fromkeys(("convert_file_size_to_int", "dtype_byte_size"), "accel_ops.weights.sizes"),
    **dict.fromkeys((
        "get_non_persistent_buffers", "id_tensor_storage", "named_module_tensors",
    ), "accel_ops.weights.tensors"),
    **dict.fromkeys((
        "check_tied_parameters_in_config", "find_tied_parameters", "retie_parameters",
    ), "accel_ops.weights.tied"),
    **dict.fromkeys((
        "get_grad_scaler", "get_mixed_precision_context_manager",
    ), "accel_plugins.precision.contexts"),
    **dict.fromkeys(("get_state_dict_offloaded_model",), "accel_train.checkpoint.offloaded"),
}
__getattr__, __dir__ = attach(__name__, _EXPORTS)
