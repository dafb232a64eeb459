"""A hooked module that is replaced hands its placement on: the replacement gets a hook of the same kind."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from torch.nn.modules.module import register_module_module_registration_hook

from accel_bigmodel.hooks.align import AlignDevicesHook
from accel_bigmodel.hooks.base import add_hook_to_module, hook_of
from accel_ops.weights.tensors import child_table

if TYPE_CHECKING:
    from torch import nn


@functools.cache
def keep_placement_of_replaced_modules() -> None:
    """From now on, `setattr` of a fresh module over a hooked one places it as the old one was.

    Called when the first model is dispatched. A replacement that has a hook already, or that contains the
    module it replaces (a wrapper such as an adapter), is left alone.
    """
    register_module_module_registration_hook(_hand_on)


def _hand_on(parent: nn.Module, name: str, replacement: nn.Module | None) -> None:
    if replacement is None:
        return
    replaced = child_table(parent).get(name)
    if replaced is None or replaced is replacement or hook_of(replacement) is not None:
        return
    hook = hook_of(replaced)
    if not isinstance(hook, AlignDevicesHook) or hook.execution_device is None:
        return
    parts = list(replacement.modules())
    if any(part is replaced or hook_of(part) is not None for part in parts):
        return
    if any(parameter.is_meta for parameter in replacement.parameters()):
        return  # not filled yet: whoever made it will place it
    add_hook_to_module(
        replacement,
        AlignDevicesHook(
            execution_device=hook.execution_device,
            offload=hook.offload,
            io_same_device=hook.io_same_device,
            offload_buffers=hook.offload_buffers,
            place_submodules=True,
            skip_keys=hook.skip_keys,
        ),
    )
