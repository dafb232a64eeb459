"""Names under the path by which users of Accelerate import them.

Written by tools/gen_exports.py from api.toml and aliases.toml; change it there.
"""

# fmt: off
from __future__ import annotations

from typing import TYPE_CHECKING

from accel_state._lazy import attach

if TYPE_CHECKING:
    from accel_ops.compile import compile_regions, compile_regions_deepspeed, compile_regions_fsdp2
    from accel_ops.modules import (
        extract_model_from_parallel, has_compiled_regions, is_compiled_module, model_has_dtensor,
    )
    from accel_ops.names import (
        get_module_children_bottom_up, get_pretty_name, merge_dicts, recursive_getattr,
    )
    from accel_ops.weights.clean import clean_state_dict_for_safetensors
    from accel_ops.weights.read import load
    from accel_ops.weights.sizes import convert_bytes
    from accel_ops.weights.write import save
    from accel_plugins.parallelism.tensor import get_model_tp_size
    from accel_state.devices.info import check_os_kernel
    from accel_state.partial_state import wait_for_everyone
    from accel_state.ports import is_port_in_use

__all__ = [
    "check_os_kernel", "clean_state_dict_for_safetensors", "compile_regions", "compile_regions_deepspeed",
    "compile_regions_fsdp2", "convert_bytes", "extract_model_from_parallel", "get_model_tp_size",
    "get_module_children_bottom_up", "get_pretty_name", "has_compiled_regions", "is_compiled_module",
    "is_port_in_use", "load", "merge_dicts", "model_has_dtensor", "recursive_getattr", "save",
    "wait_for_everyone",
]

_EXPORTS = {
    **dict.fromkeys((
        "compile_regions", "compile_regions_deepspeed", "compile_regions_fsdp2",
    ), "accel_ops.compile"),
    **dict.fromkeys((
        "extract_model_from_parallel", "has_compiled_regions", "is_compiled_module", "model_has_dtensor",
    ), "accel_ops.modules"),
    **dict.fromkeys((
        "get_module_children_bottom_up", "get_pretty_name", "merge_dicts", "recursive_getattr",
    ), "accel_ops.names"),
    **dict.fromkeys(("clean_state_dict_for_safetensors",), "accel_ops.weights.clean"),
    **dict.fromkeys(("load",), "accel_ops.weights.read"),
    **dict.fromkeys(("convert_bytes",), "accel_ops.weights.sizes"),
    **dict.fromkeys(("save",), "accel_ops.weights.write"),
    **dict.fromkeys(("get_model_tp_size",), "accel_plugins.parallelism.tensor"),
    **dict.fromkeys(("check_os_kernel",), "accel_state.devices.info"),
    **dict.fromkeys(("wait_for_everyone",), "accel_state.partial_state"),
    **dict.fromkeys(("is_port_in_use",), "accel_state.ports"),
}
__getattr__, __dir__ = attach(__name__, _EXPORTS)
