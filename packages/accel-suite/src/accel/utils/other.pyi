# fmt: off
from accel_ops.modules import (
    compile_regions as compile_regions, compile_regions_deepspeed as compile_regions_deepspeed,
    compile_regions_fsdp2 as compile_regions_fsdp2,
    extract_model_from_parallel as extract_model_from_parallel,
    get_module_children_bottom_up as get_module_children_bottom_up, get_pretty_name as get_pretty_name,
    has_compiled_regions as has_compiled_regions, is_compiled_module as is_compiled_module,
    merge_dicts as merge_dicts, model_has_dtensor as model_has_dtensor,
    recursive_getattr as recursive_getattr,
)
from accel_ops.weights.layout import convert_bytes as convert_bytes
from accel_ops.weights.read import load as load
from accel_ops.weights.safetensors_io import (
    clean_state_dict_for_safetensors as clean_state_dict_for_safetensors,
)
from accel_ops.weights.write import save as save
from accel_plugins.parallelism.tensor import get_model_tp_size as get_model_tp_size
from accel_state.device_kinds import check_os_kernel as check_os_kernel
from accel_state.partial_state import wait_for_everyone as wait_for_everyone
from accel_state.topology import is_port_in_use as is_port_in_use
