"""Map torch's optimizers to DeepSpeed's CPU versions."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from accel_plugins.deepspeed.library import ds_module, load_library

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

# Arguments that both have keep their names; only these are added.
_VERSIONS: Mapping[str, tuple[str, str, Mapping[str, Any]]] = {
    "AdamW": ("ops.adam", "DeepSpeedCPUAdam", {"adamw_mode": True}),
    "Adam": ("ops.adam", "DeepSpeedCPUAdam", {"adamw_mode": False}),
    "Adagrad": ("ops.adagrad", "DeepSpeedCPUAdagrad", {}),
    "Lion": ("ops.lion", "DeepSpeedCPULion", {}),
}


def map_pytorch_optim_to_deepspeed(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Build DeepSpeed's CPU version of an optimizer, for offloading.

    Args:
        optimizer: Adam, AdamW, Adagrad, Lion, or a subclass; any other is returned unchanged.

    Returns:
        An optimizer of the same parameter groups, without state.

    Raises:
        MissingDependencyError: DeepSpeed is not installed.
    """
    names = [kind.__name__ for kind in type(optimizer).__mro__]
    found = next((_VERSIONS[name] for name in names if name in _VERSIONS), None)
    if found is None or any(kind.__module__.startswith("deepspeed.") for kind in type(optimizer).__mro__):
        return optimizer
    load_library("map_pytorch_optim_to_deepspeed()")
    module, name, more = found
    version = getattr(ds_module(module), name)
    accepted = inspect.signature(version).parameters
    known = {key: value for key, value in optimizer.defaults.items() if key in accepted and key not in more}
    return version(optimizer.param_groups, **known, **more)
