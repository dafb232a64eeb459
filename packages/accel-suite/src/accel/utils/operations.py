"""Names under the path by which users of Accelerate import them.

Written by tools/gen_exports.py from api.toml and aliases.toml; change it there.
"""

# fmt: off
from __future__ import annotations

from typing import TYPE_CHECKING

from accel_state._lazy import attach

if TYPE_CHECKING:
    from accel_ops.collect import broadcast, broadcast_object_list, gather, gather_object, reduce
    from accel_ops.move import copy_tensor_to_devices, send_to_device
    from accel_ops.pad import CannotPadNestedTensorWarning, pad_across_processes, pad_input_tensors
    from accel_ops.precision import convert_outputs_to_fp32, convert_to_fp32
    from accel_ops.tree import (
        concatenate, find_batch_size, find_device, get_data_structure, honor_type, ignorant_find_batch_size,
        initialize_tensors, is_namedtuple, is_tensor_information, is_torch_tensor, listify,
        recursively_apply, slice_tensors,
    )
    from accel_plugins.deepspeed.gathered import GatheredParameters
    from accel_state.errors import DistributedOperationException
    from accel_state.labels import TORCH_DISTRIBUTED_OPERATION_TYPES

__all__ = [
    "CannotPadNestedTensorWarning", "DistributedOperationException", "GatheredParameters",
    "TORCH_DISTRIBUTED_OPERATION_TYPES", "broadcast", "broadcast_object_list", "concatenate",
    "convert_outputs_to_fp32", "convert_to_fp32", "copy_tensor_to_devices", "find_batch_size",
    "find_device", "gather", "gather_object", "get_data_structure", "honor_type",
    "ignorant_find_batch_size", "initialize_tensors", "is_namedtuple", "is_tensor_information",
    "is_torch_tensor", "listify", "pad_across_processes", "pad_input_tensors", "recursively_apply",
    "reduce", "send_to_device", "slice_tensors",
]

_EXPORTS = {
    **dict.fromkeys((
        "broadcast", "broadcast_object_list", "gather", "gather_object", "reduce",
    ), "accel_ops.collect"),
    **dict.fromkeys(("copy_tensor_to_devices", "send_to_device"), "accel_ops.move"),
    **dict.fromkeys((
        "CannotPadNestedTensorWarning", "pad_across_processes", "pad_input_tensors",
    ), "accel_ops.pad"),
    **dict.fromkeys(("convert_outputs_to_fp32", "convert_to_fp32"), "accel_ops.precision"),
    **dict.fromkeys((
        "concatenate", "find_batch_size", "find_device", "get_data_structure", "honor_type",
        "ignorant_find_batch_size", "initialize_tensors", "is_namedtuple", "is_tensor_information",
        "is_torch_tensor", "listify", "recursively_apply", "slice_tensors",
    ), "accel_ops.tree"),
    **dict.fromkeys(("GatheredParameters",), "accel_plugins.deepspeed.gathered"),
    **dict.fromkeys(("DistributedOperationException",), "accel_state.errors"),
    **dict.fromkeys(("TORCH_DISTRIBUTED_OPERATION_TYPES",), "accel_state.labels"),
}
__getattr__, __dir__ = attach(__name__, _EXPORTS)
