"""Give memory back: of objects that are done with, and of the caching allocators of devices."""

from __future__ import annotations

import gc
from typing import Any

from accel_state.devices.kinds import available_kind


def clear_device_cache(garbage_collection: bool = False) -> None:
    """Give cached memory of the device back to the driver; does nothing on the CPU.

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
    """Let go of objects and give the memory behind them back.

    Args:
        *objects: Models, optimizers, tensors … A function cannot delete its caller's names, so these must be
            assigned anew.

    Returns:
        As many `None` as there were objects.

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
