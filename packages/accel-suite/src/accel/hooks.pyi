# fmt: off
from accel_bigmodel.hooks.align import AlignDevicesHook as AlignDevicesHook
from accel_bigmodel.hooks.attach import (
    attach_align_device_hook as attach_align_device_hook,
    attach_align_device_hook_on_blocks as attach_align_device_hook_on_blocks,
    attach_execution_device_hook as attach_execution_device_hook,
)
from accel_bigmodel.hooks.base import (
    ModelHook as ModelHook, SequentialHook as SequentialHook, add_hook_to_module as add_hook_to_module,
    remove_hook_from_module as remove_hook_from_module,
    remove_hook_from_submodules as remove_hook_from_submodules,
)
from accel_bigmodel.hooks.layerwise import LayerwiseCastingHook as LayerwiseCastingHook
from accel_bigmodel.hooks.offload import CpuOffload as CpuOffload, UserCpuOffloadHook as UserCpuOffloadHook
