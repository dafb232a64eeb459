# fmt: off
from accel_ops.compile import (
    compile_regions as compile_regions, compile_regions_deepspeed as compile_regions_deepspeed,
    compile_regions_fsdp2 as compile_regions_fsdp2,
)
from accel_ops.modules import (
    extract_model_from_parallel as extract_model_from_parallel,
    has_compiled_regions as has_compiled_regions, is_compiled_module as is_compiled_module,
    model_has_dtensor as model_has_dtensor,
)
from accel_ops.names import (
    get_module_children_bottom_up as get_module_children_bottom_up, get_pretty_name as get_pretty_name,
    merge_dicts as merge_dicts, recursive_getattr as recursive_getattr,
)
from accel_ops.weights.read import load as load
from accel_ops.weights.sizes import convert_bytes as convert_bytes
from accel_ops.weights.stream import clean_state_dict_for_safetensors as clean_state_dict_for_safetensors
from accel_ops.weights.write import save as save
from accel_plugins.parallelism.tensor import get_model_tp_size as get_model_tp_size
from accel_state.devices.info import check_os_kernel as check_os_kernel
from accel_state.partial_state import wait_for_everyone as wait_for_everyone
from accel_state.ports import is_port_in_use as is_port_in_use
