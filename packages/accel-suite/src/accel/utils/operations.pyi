# fmt: off
from accel_ops.collectives import (
    broadcast as broadcast, broadcast_object_list as broadcast_object_list, gather as gather,
    gather_object as gather_object, reduce as reduce,
)
from accel_ops.pad import (
    CannotPadNestedTensorWarning as CannotPadNestedTensorWarning,
    pad_across_processes as pad_across_processes, pad_input_tensors as pad_input_tensors,
)
from accel_ops.tree import (
    concatenate as concatenate, convert_outputs_to_fp32 as convert_outputs_to_fp32,
    convert_to_fp32 as convert_to_fp32, copy_tensor_to_devices as copy_tensor_to_devices,
    find_batch_size as find_batch_size, find_device as find_device,
    get_data_structure as get_data_structure, honor_type as honor_type,
    ignorant_find_batch_size as ignorant_find_batch_size, initialize_tensors as initialize_tensors,
    is_namedtuple as is_namedtuple, is_tensor_information as is_tensor_information,
    is_torch_tensor as is_torch_tensor, listify as listify, recursively_apply as recursively_apply,
    send_to_device as send_to_device, slice_tensors as slice_tensors,
)
from accel_plugins.deepspeed.library import GatheredParameters as GatheredParameters
from accel_state.errors import DistributedOperationException as DistributedOperationException
from accel_state.labels import TORCH_DISTRIBUTED_OPERATION_TYPES as TORCH_DISTRIBUTED_OPERATION_TYPES
