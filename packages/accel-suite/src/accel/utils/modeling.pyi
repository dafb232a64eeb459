# fmt: off
from accel_bigmodel.device_map import (
    check_device_map as check_device_map,
    check_tied_parameters_on_same_device as check_tied_parameters_on_same_device,
    get_balanced_memory as get_balanced_memory, get_max_memory as get_max_memory,
    infer_auto_device_map as infer_auto_device_map,
)
from accel_bigmodel.device_plan import clean_device_map as clean_device_map
from accel_bigmodel.hooks import (
    align_module_device as align_module_device, has_offloaded_params as has_offloaded_params,
)
from accel_bigmodel.load import load_checkpoint_in_model as load_checkpoint_in_model
from accel_bigmodel.offload import load_offloaded_weights as load_offloaded_weights
from accel_bigmodel.placement import set_module_tensor_to_device as set_module_tensor_to_device
from accel_bigmodel.sizes import (
    calculate_maximum_sizes as calculate_maximum_sizes, compute_module_sizes as compute_module_sizes,
    compute_module_total_buffer_size as compute_module_total_buffer_size,
    get_max_layer_size as get_max_layer_size, get_module_size_with_ties as get_module_size_with_ties,
)
from accel_ops.modules import is_peft_model as is_peft_model
from accel_ops.weights.layout import (
    SAFE_WEIGHTS_NAME as SAFE_WEIGHTS_NAME, WEIGHTS_INDEX_NAME as WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME as WEIGHTS_NAME, convert_file_size_to_int as convert_file_size_to_int,
    dtype_byte_size as dtype_byte_size,
)
from accel_ops.weights.read import load_state_dict as load_state_dict
from accel_ops.weights.tensors import (
    check_tied_parameters_in_config as check_tied_parameters_in_config,
    find_tied_parameters as find_tied_parameters, get_non_persistent_buffers as get_non_persistent_buffers,
    id_tensor_storage as id_tensor_storage, named_module_tensors as named_module_tensors,
    retie_parameters as retie_parameters,
)
from accel_plugins.precision import (
    get_grad_scaler as get_grad_scaler,
    get_mixed_precision_context_manager as get_mixed_precision_context_manager,
)
from accel_train.checkpoint.single_files import (
    get_state_dict_offloaded_model as get_state_dict_offloaded_model,
)
