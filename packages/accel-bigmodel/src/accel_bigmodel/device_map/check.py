"""Check a device map: everything is placed, tied weights are together."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from accel_ops.weights.read import device_of
from accel_ops.weights.tensors import named_module_tensors
from accel_state.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import torch
    from torch import nn

    Device = int | str | torch.device

_log = logging.getLogger(__name__)
_SHOWN = 10


def check_device_map(model: nn.Module, device_map: Mapping[str, Device]) -> None:
    """Check that a map places every parameter and buffer of a model.

    Args:
        model: The model.
        device_map: Module or tensor name to device; `""` is the whole model.

    Raises:
        SettingsError: Tensors are left without a device; they are named, with the entries that name nothing.

    Example:
        >>> from torch import nn
        >>> check_device_map(nn.Sequential(nn.Linear(2, 2)), {"0": "cpu"})
    """
    names = [name for name, _ in named_module_tensors(model, recurse=True)]
    homeless = [name for name in names if device_of(name, device_map) is None]
    if not homeless:
        return
    known = {name for name, _ in model.named_modules(remove_duplicate=False)} | set(names)
    unknown = [repr(key) for key in device_map if key not in known]
    hint = f"; it has entries that name no part: {_some(unknown)}" if unknown else ""
    raise SettingsError(
        f"the device_map gives no device to {_some(homeless)}{hint}. Add them, or an entry '' for the rest"
    )


def check_tied_parameters_on_same_device(
    tied_params: Iterable[Iterable[str]], device_map: Mapping[str, Device]
) -> None:
    """Warn of tied weights that a map sends to different devices: each device then holds a copy of its own.

    Args:
        tied_params: Groups of names, from `find_tied_parameters`.
        device_map: Module or tensor name to device.
    """
    for group in tied_params:
        places = {name: device_of(name, device_map) for name in group}
        if len(set(places.values())) > 1:
            shown = ", ".join(f"{name} on {device}" for name, device in places.items())
            _log.warning(
                "Tied weights are sent to different devices, where each has its own copy: %s.", shown
            )


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
