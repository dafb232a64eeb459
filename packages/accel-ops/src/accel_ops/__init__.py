"""Collectives, moves and conversions of nested data: the export table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel_state._lazy import attach

if TYPE_CHECKING:
    from accel_ops.collect import broadcast as broadcast
    from accel_ops.collect import broadcast_object_list as broadcast_object_list
    from accel_ops.collect import gather as gather
    from accel_ops.collect import gather_object as gather_object
    from accel_ops.collect import reduce as reduce
    from accel_ops.move import copy_tensor_to_devices as copy_tensor_to_devices
    from accel_ops.move import send_to_device as send_to_device
    from accel_ops.pad import CannotPadNestedTensorWarning as CannotPadNestedTensorWarning
    from accel_ops.pad import pad_across_processes as pad_across_processes
    from accel_ops.pad import pad_input_tensors as pad_input_tensors
    from accel_ops.precision import ConvertOutputsToFp32 as ConvertOutputsToFp32
    from accel_ops.precision import convert_outputs_to_fp32 as convert_outputs_to_fp32
    from accel_ops.precision import convert_to_fp32 as convert_to_fp32
    from accel_ops.tree import TensorInformation as TensorInformation
    from accel_ops.tree import concatenate as concatenate
    from accel_ops.tree import find_batch_size as find_batch_size
    from accel_ops.tree import find_device as find_device
    from accel_ops.tree import get_data_structure as get_data_structure
    from accel_ops.tree import get_shape as get_shape
    from accel_ops.tree import honor_type as honor_type
    from accel_ops.tree import ignorant_find_batch_size as ignorant_find_batch_size
    from accel_ops.tree import initialize_tensors as initialize_tensors
    from accel_ops.tree import is_namedtuple as is_namedtuple
    from accel_ops.tree import is_tensor_information as is_tensor_information
    from accel_ops.tree import is_torch_tensor as is_torch_tensor
    from accel_ops.tree import listify as listify
    from accel_ops.tree import recursively_apply as recursively_apply
    from accel_ops.tree import slice_tensors as slice_tensors
    from accel_state.errors import DistributedOperationException as DistributedOperationException

__all__ = [
    "CannotPadNestedTensorWarning",
    "ConvertOutputsToFp32",
    "DistributedOperationException",
    "TensorInformation",
    "broadcast",
    "broadcast_object_list",
    "concatenate",
    "convert_outputs_to_fp32",
    "convert_to_fp32",
    "copy_tensor_to_devices",
    "find_batch_size",
    "find_device",
    "gather",
    "gather_object",
    "get_data_structure",
    "get_shape",
    "honor_type",
    "ignorant_find_batch_size",
    "initialize_tensors",
    "is_namedtuple",
    "is_tensor_information",
    "is_torch_tensor",
    "listify",
    "pad_across_processes",
    "pad_input_tensors",
    "recursively_apply",
    "reduce",
    "send_to_device",
    "slice_tensors",
]

_MODULES = {
    "accel_ops.collect": ("broadcast", "broadcast_object_list", "gather", "gather_object", "reduce"),
    "accel_ops.move": ("copy_tensor_to_devices", "send_to_device"),
    "accel_ops.pad": ("CannotPadNestedTensorWarning", "pad_across_processes", "pad_input_tensors"),
    "accel_ops.precision": ("ConvertOutputsToFp32", "convert_outputs_to_fp32", "convert_to_fp32"),
    "accel_state.errors": ("DistributedOperationException",),
}

__getattr__, __dir__ = attach(
    __name__,
    dict.fromkeys(__all__, "accel_ops.tree")
    | {name: module for module, names in _MODULES.items() for name in names},
)
