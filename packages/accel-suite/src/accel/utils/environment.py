"""Environment variables, CPU topology and driver facts.

Written by tools/gen_exports.py from api.toml and aliases.toml; change it there.
"""

# fmt: off
from __future__ import annotations

from typing import TYPE_CHECKING

from accel_state._lazy import attach

if TYPE_CHECKING:
    from accel_state.devices.affinity import override_numa_affinity, set_numa_affinity
    from accel_state.devices.info import check_cuda_p2p_ib_support, get_driver_version, get_gpu_info
    from accel_state.devices.probes import check_cuda_fp8_capability, get_current_device_type
    from accel_state.environ import (
        are_libraries_initialized, clear_environment, convert_dict_to_env_variables, get_int_from_env,
        parse_choice_from_env, parse_flag_from_env, patch_environment, purge_accelerate_environment,
        str_to_bool,
    )
    from accel_state.topology import CPUInformation, get_cpu_distributed_information

__all__ = [
    "CPUInformation", "are_libraries_initialized", "check_cuda_fp8_capability", "check_cuda_p2p_ib_support",
    "clear_environment", "convert_dict_to_env_variables", "get_cpu_distributed_information",
    "get_current_device_type", "get_driver_version", "get_gpu_info", "get_int_from_env",
    "override_numa_affinity", "parse_choice_from_env", "parse_flag_from_env", "patch_environment",
    "purge_accelerate_environment", "set_numa_affinity", "str_to_bool",
]

_EXPORTS = {
    **dict.fromkeys(("override_numa_affinity", "set_numa_affinity"), "accel_state.devices.affinity"),
    **dict.fromkeys((
        "check_cuda_p2p_ib_support", "get_driver_version", "get_gpu_info",
    ), "accel_state.devices.info"),
    **dict.fromkeys(("check_cuda_fp8_capability", "get_current_device_type"), "accel_state.devices.probes"),
    **dict.fromkeys((
        "are_libraries_initialized", "clear_environment", "convert_dict_to_env_variables",
        "get_int_from_env", "parse_choice_from_env", "parse_flag_from_env", "patch_environment",
        "purge_accelerate_environment", "str_to_bool",
    ), "accel_state.environ"),
    **dict.fromkeys(("CPUInformation", "get_cpu_distributed_information"), "accel_state.topology"),
}
__getattr__, __dir__ = attach(__name__, _EXPORTS)
