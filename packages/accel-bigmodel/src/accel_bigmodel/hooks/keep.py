"""A hooked module that is replaced hands its placement on: the replacement gets a hook of the same kind."""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING

from torch.nn.modules.module import register_module_module_registration_hook

from accel_bigmodel.hooks.align import AlignDevicesHook
from accel_bigmodel.hooks.base import add_hook_to_module, hook_of
from accel_ops.weights.tensors import child_table

if TYPE_CHECKING:
    from torch import nn
    from torch.utils.hooks import RemovableHandle

_lock = threading.RLock()  # a finalizer may run while the same thread holds it
_models: set[int] = set()
_handle: RemovableHandle | None = None


def hook_replaced_modules(model: nn.Module) -> None:
    """While `model` lives, let `setattr` of a fresh module over a hooked one place it as the old one was.

    torch offers this event for the whole process only; the registration ends with the last dispatched model.
    A replacement that has a hook already, or that contains the module it replaces (a wrapper such as an
    adapter), is left alone.
    """
    global _handle  # noqa: PLW0603 - the one registration of the process
    with _lock:
        if id(model) in _models:
            return
        _models.add(id(model))
        weakref.finalize(model, _release, id(model)).atexit = False
        if _handle is None:
            _handle = register_module_module_registration_hook(_transfer)


def _release(model_id: int) -> None:
    global _handle  # noqa: PLW0603 - see above
    with _lock:
        _models.discard(model_id)
        if not _models and _handle is not None:
            _handle.remove()
            _handle = None


def _transfer(parent: nn.Module, name: str, replacement: nn.Module | None) -> None:
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
