"""Models larger than memory.

Written by tools/gen_exports.py from api.toml and aliases.toml; change it there.
"""

# fmt: off
from __future__ import annotations

from typing import TYPE_CHECKING

from accel_state._lazy import attach

if TYPE_CHECKING:
    from accel_bigmodel.device_map.budget import get_balanced_memory
    from accel_bigmodel.device_map.check import check_device_map
    from accel_bigmodel.device_map.infer import infer_auto_device_map
    from accel_bigmodel.dispatch import cpu_offload, cpu_offload_with_hook, disk_offload, dispatch_model
    from accel_bigmodel.empty import init_empty_weights, init_on_device
    from accel_bigmodel.hooks.layerwise import (
        SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING, attach_layerwise_casting_hooks,
    )
    from accel_bigmodel.loading import load_checkpoint_and_dispatch

__all__ = [
    "SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING", "attach_layerwise_casting_hooks", "check_device_map",
    "cpu_offload", "cpu_offload_with_hook", "disk_offload", "dispatch_model", "get_balanced_memory",
    "infer_auto_device_map", "init_empty_weights", "init_on_device", "load_checkpoint_and_dispatch",
]

_EXPORTS = {
    **dict.fromkeys(("get_balanced_memory",), "accel_bigmodel.device_map.budget"),
    **dict.fromkeys(("check_device_map",), "accel_bigmodel.device_map.check"),
    **dict.fromkeys(("infer_auto_device_map",), "accel_bigmodel.device_map.infer"),
    **dict.fromkeys((
        "cpu_offload", "cpu_offload_with_hook", "disk_offload", "dispatch_model",
    ), "accel_bigmodel.dispatch"),
    **dict.fromkeys(("init_empty_weights", "init_on_device"), "accel_bigmodel.empty"),
    **dict.fromkeys((
        "SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING", "attach_layerwise_casting_hooks",
    ), "accel_bigmodel.hooks.layerwise"),
    **dict.fromkeys(("load_checkpoint_and_dispatch",), "accel_bigmodel.loading"),
}
__getattr__, __dir__ = attach(__name__, _EXPORTS)
