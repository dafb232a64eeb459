"""Hooks around a module's forward pass.

Written by tools/gen_exports.py from api.toml and aliases.toml; change it there.
"""

# fmt: off
from __future__ import annotations

from typing import TYPE_CHECKING

from accel_state._lazy import attach

if TYPE_CHECKING:
    from accel_bigmodel.hooks.align import AlignDevicesHook
    from accel_bigmodel.hooks.attach import (
        attach_align_device_hook, attach_align_device_hook_on_blocks, attach_execution_device_hook,
    )
    from accel_bigmodel.hooks.base import (
        ModelHook, SequentialHook, add_hook_to_module, remove_hook_from_module, remove_hook_from_submodules,
    )
    from accel_bigmodel.hooks.layerwise import LayerwiseCastingHook
    from accel_bigmodel.hooks.offload import CpuOffload, UserCpuOffloadHook

__all__ = [
    "AlignDevicesHook", "CpuOffload", "LayerwiseCastingHook", "ModelHook", "SequentialHook",
    "UserCpuOffloadHook", "add_hook_to_module", "attach_align_device_hook",
    "attach_align_device_hook_on_blocks", "attach_execution_device_hook", "remove_hook_from_module",
    "remove_hook_from_submodules",
]

_EXPORTS = {
    **dict.fromkeys(("AlignDevicesHook",), "accel_bigmodel.hooks.align"),
    **dict.fromkeys((
        "attach_align_device_hook", "attach_align_device_hook_on_blocks", "attach_execution_device_hook",
    ), "accel_bigmodel.hooks.attach"),
    **dict.fromkeys((
        "ModelHook", "SequentialHook", "add_hook_to_module", "remove_hook_from_module",
        "remove_hook_from_submodules",
    ), "accel_bigmodel.hooks.base"),
    **dict.fromkeys(("LayerwiseCastingHook",), "accel_bigmodel.hooks.layerwise"),
    **dict.fromkeys(("CpuOffload", "UserCpuOffloadHook"), "accel_bigmodel.hooks.offload"),
}
__getattr__, __dir__ = attach(__name__, _EXPORTS)
