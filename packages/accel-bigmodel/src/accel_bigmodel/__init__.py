"""Models larger than memory: meta models, device maps, mapped checkpoints, offload."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel_state._lazy import attach

if TYPE_CHECKING:
    from accel_bigmodel.device_map.budget import get_balanced_memory as get_balanced_memory
    from accel_bigmodel.device_map.budget import get_max_memory as get_max_memory
    from accel_bigmodel.device_map.check import check_device_map as check_device_map
    from accel_bigmodel.device_map.check import (
        check_tied_parameters_on_same_device as check_tied_parameters_on_same_device,
    )
    from accel_bigmodel.device_map.infer import infer_auto_device_map as infer_auto_device_map
    from accel_bigmodel.device_map.workload import Workload as Workload
    from accel_bigmodel.device_map.workload import kv_cache as kv_cache
    from accel_bigmodel.device_map.workload import measure_activations as measure_activations
    from accel_bigmodel.dispatch import cpu_offload as cpu_offload
    from accel_bigmodel.dispatch import cpu_offload_with_hook as cpu_offload_with_hook
    from accel_bigmodel.dispatch import disk_offload as disk_offload
    from accel_bigmodel.dispatch import dispatch_model as dispatch_model
    from accel_bigmodel.empty import init_empty_weights as init_empty_weights
    from accel_bigmodel.empty import init_on_device as init_on_device
    from accel_bigmodel.explanation import DeviceUsage as DeviceUsage
    from accel_bigmodel.explanation import Explanation as Explanation
    from accel_bigmodel.explanation import explain as explain
    from accel_bigmodel.hooks.align import AlignDevicesHook as AlignDevicesHook
    from accel_bigmodel.hooks.align import align_module_device as align_module_device
    from accel_bigmodel.hooks.align import has_offloaded_params as has_offloaded_params
    from accel_bigmodel.hooks.attach import attach_align_device_hook as attach_align_device_hook
    from accel_bigmodel.hooks.attach import (
        attach_align_device_hook_on_blocks as attach_align_device_hook_on_blocks,
    )
    from accel_bigmodel.hooks.attach import attach_execution_device_hook as attach_execution_device_hook
    from accel_bigmodel.hooks.base import ModelHook as ModelHook
    from accel_bigmodel.hooks.base import SequentialHook as SequentialHook
    from accel_bigmodel.hooks.base import add_hook_to_module as add_hook_to_module
    from accel_bigmodel.hooks.base import remove_hook_from_module as remove_hook_from_module
    from accel_bigmodel.hooks.base import remove_hook_from_submodules as remove_hook_from_submodules
    from accel_bigmodel.hooks.layerwise import (
        SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING as SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING,
    )
    from accel_bigmodel.hooks.layerwise import LayerwiseCastingHook as LayerwiseCastingHook
    from accel_bigmodel.hooks.layerwise import (
        attach_layerwise_casting_hooks as attach_layerwise_casting_hooks,
    )
    from accel_bigmodel.hooks.offload import CpuOffload as CpuOffload
    from accel_bigmodel.hooks.offload import UserCpuOffloadHook as UserCpuOffloadHook
    from accel_bigmodel.loading import load_checkpoint_and_dispatch as load_checkpoint_and_dispatch
    from accel_bigmodel.loading import load_checkpoint_in_model as load_checkpoint_in_model
    from accel_bigmodel.offload import OffloadedWeightsLoader as OffloadedWeightsLoader
    from accel_bigmodel.offload import PrefixedDataset as PrefixedDataset
    from accel_bigmodel.offload import extract_submodules_state_dict as extract_submodules_state_dict
    from accel_bigmodel.offload import load_offloaded_weight as load_offloaded_weight
    from accel_bigmodel.offload import load_offloaded_weights as load_offloaded_weights
    from accel_bigmodel.offload import offload_state_dict as offload_state_dict
    from accel_bigmodel.offload import offload_weight as offload_weight
    from accel_bigmodel.offload_index import save_offload_index as save_offload_index
    from accel_bigmodel.placement import set_module_tensor_to_device as set_module_tensor_to_device
    from accel_bigmodel.report import FileReport as FileReport
    from accel_bigmodel.report import LoadReport as LoadReport
    from accel_bigmodel.sizes import calculate_maximum_sizes as calculate_maximum_sizes
    from accel_bigmodel.sizes import compute_module_sizes as compute_module_sizes
    from accel_bigmodel.sizes import get_max_layer_size as get_max_layer_size

__all__ = [
    "SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING",
    "AlignDevicesHook",
    "CpuOffload",
    "DeviceUsage",
    "Explanation",
    "FileReport",
    "LayerwiseCastingHook",
    "LoadReport",
    "ModelHook",
    "OffloadedWeightsLoader",
    "PrefixedDataset",
    "SequentialHook",
    "UserCpuOffloadHook",
    "Workload",
    "add_hook_to_module",
    "align_module_device",
    "attach_align_device_hook",
    "attach_align_device_hook_on_blocks",
    "attach_execution_device_hook",
    "attach_layerwise_casting_hooks",
    "calculate_maximum_sizes",
    "check_device_map",
    "check_tied_parameters_on_same_device",
    "compute_module_sizes",
    "cpu_offload",
    "cpu_offload_with_hook",
    "disk_offload",
    "dispatch_model",
    "explain",
    "extract_submodules_state_dict",
    "get_balanced_memory",
    "get_max_layer_size",
    "get_max_memory",
    "has_offloaded_params",
    "infer_auto_device_map",
    "init_empty_weights",
    "init_on_device",
    "kv_cache",
    "load_checkpoint_and_dispatch",
    "load_checkpoint_in_model",
    "load_offloaded_weight",
    "load_offloaded_weights",
    "measure_activations",
    "offload_state_dict",
    "offload_weight",
    "remove_hook_from_module",
    "remove_hook_from_submodules",
    "save_offload_index",
    "set_module_tensor_to_device",
]

__getattr__, __dir__ = attach(
    __name__,
    {
        "AlignDevicesHook": "accel_bigmodel.hooks.align",
        "CpuOffload": "accel_bigmodel.hooks.offload",
        "DeviceUsage": "accel_bigmodel.explanation",
        "Explanation": "accel_bigmodel.explanation",
        "FileReport": "accel_bigmodel.report",
        "LayerwiseCastingHook": "accel_bigmodel.hooks.layerwise",
        "LoadReport": "accel_bigmodel.report",
        "ModelHook": "accel_bigmodel.hooks.base",
        "OffloadedWeightsLoader": "accel_bigmodel.offload",
        "PrefixedDataset": "accel_bigmodel.offload",
        "SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING": "accel_bigmodel.hooks.layerwise",
        "SequentialHook": "accel_bigmodel.hooks.base",
        "UserCpuOffloadHook": "accel_bigmodel.hooks.offload",
        "Workload": "accel_bigmodel.device_map.workload",
        "add_hook_to_module": "accel_bigmodel.hooks.base",
        "align_module_device": "accel_bigmodel.hooks.align",
        "attach_align_device_hook": "accel_bigmodel.hooks.attach",
        "attach_align_device_hook_on_blocks": "accel_bigmodel.hooks.attach",
        "attach_execution_device_hook": "accel_bigmodel.hooks.attach",
        "attach_layerwise_casting_hooks": "accel_bigmodel.hooks.layerwise",
        "calculate_maximum_sizes": "accel_bigmodel.sizes",
        "check_device_map": "accel_bigmodel.device_map.check",
        "check_tied_parameters_on_same_device": "accel_bigmodel.device_map.check",
        "compute_module_sizes": "accel_bigmodel.sizes",
        "cpu_offload": "accel_bigmodel.dispatch",
        "cpu_offload_with_hook": "accel_bigmodel.dispatch",
        "disk_offload": "accel_bigmodel.dispatch",
        "dispatch_model": "accel_bigmodel.dispatch",
        "explain": "accel_bigmodel.explanation",
        "extract_submodules_state_dict": "accel_bigmodel.offload",
        "get_balanced_memory": "accel_bigmodel.device_map.budget",
        "get_max_layer_size": "accel_bigmodel.sizes",
        "get_max_memory": "accel_bigmodel.device_map.budget",
        "has_offloaded_params": "accel_bigmodel.hooks.align",
        "infer_auto_device_map": "accel_bigmodel.device_map.infer",
        "init_empty_weights": "accel_bigmodel.empty",
        "init_on_device": "accel_bigmodel.empty",
        "kv_cache": "accel_bigmodel.device_map.workload",
        "load_checkpoint_and_dispatch": "accel_bigmodel.loading",
        "load_checkpoint_in_model": "accel_bigmodel.loading",
        "load_offloaded_weight": "accel_bigmodel.offload",
        "load_offloaded_weights": "accel_bigmodel.offload",
        "measure_activations": "accel_bigmodel.device_map.workload",
        "offload_state_dict": "accel_bigmodel.offload",
        "offload_weight": "accel_bigmodel.offload",
        "remove_hook_from_module": "accel_bigmodel.hooks.base",
        "remove_hook_from_submodules": "accel_bigmodel.hooks.base",
        "save_offload_index": "accel_bigmodel.offload_index",
        "set_module_tensor_to_device": "accel_bigmodel.placement",
    },
)
