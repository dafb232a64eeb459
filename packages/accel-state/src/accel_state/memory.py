"""Release the memory of objects and of the caching allocators of devices."""

from __future__ import annotations

import gc
from typing import Any

from accel_state.devices.kinds import available_kind


def clear_device_cache(garbage_collection: bool = False) -> None:
    """Release cached memory of the device to the driver; do nothing on the CPU.

    Args:
        garbage_collection: Collect unreachable objects first.

    Example:
        >>> clear_device_cache()
    """
    if garbage_collection:
        gc.collect()
    empty_cache = getattr(available_kind().module, "empty_cache", None)
    if empty_cache is not None:
        empty_cache()


def release_memory(*objects: Any) -> list[None]:
    """Release objects and their memory.

    Args:
        *objects: Models, optimizers, tensors … A function cannot delete its caller's names, so these must be
            assigned anew.

    Example:
        >>> model, optimizer = object(), object()
        >>> model, optimizer = release_memory(model, optimizer)
        >>> model is None
        True
    """
    count = len(objects)
    del objects
    clear_device_cache(garbage_collection=True)
    return [None] * count
