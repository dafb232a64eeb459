"""Check a device map: everything is placed, tied weights are together."""

from __future__ import annotations

import logging
import reprlib
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from accel_ops.weights.read import device_of
from accel_ops.weights.tensors import named_module_tensors
from accel_state.errors import SettingsError, some_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import nn

    Device = int | str | torch.device

_log = logging.getLogger(__name__)


def check_device_map(model: nn.Module, device_map: Mapping[str, Device]) -> None:
    """Check that a map places every parameter and buffer of a model.

    Warns:
        UserWarning: The map names modules or tensors that the model lacks.

    Raises:
        SettingsError: It is no mapping, a value is no device, or tensors are left without a device; what is
            wrong is named.

    Example:
        >>> from torch import nn
        >>> check_device_map(nn.Sequential(nn.Linear(2, 2)), {"0": "cpu"})
    """
    if not isinstance(device_map, Mapping):
        raise SettingsError(
            f"device_map is {reprlib.repr(device_map)}: pass a mapping of module names to devices, such as "
            "{'': 0}"
        )
    for name, device in device_map.items():
        _check_device(name, device)
    known = known_entries(model, device_map)
    unknown = [repr(name) for name in device_map if name not in known]
    names = [name for name, _ in named_module_tensors(model, recurse=True)]
    unplaced = [name for name in names if device_of(name, device_map) is None]
    stray = f"names no part of {type(model).__name__}: {some_of(unknown)}" if unknown else ""
    if unplaced:
        also = f"{stray}, and " if stray else ""
        raise SettingsError(
            f"the device_map {also}gives no device to {some_of(unplaced)}. Add them, or '' for the rest"
        )
    if stray:
        warnings.warn(f"The device_map {stray}. These entries have no effect.", stacklevel=3)


def known_entries(model: nn.Module, device_map: Mapping[str, Device]) -> dict[str, Device]:
    """Leave out the entries of a map that name no part of a model.

    Example:
        >>> from torch import nn
        >>> known_entries(nn.Sequential(nn.Linear(2, 2)), {"0": "cpu", "1": 0})
        {'0': 'cpu'}
    """
    names = {name for name, _ in model.named_modules(remove_duplicate=False)}
    names |= {name for name, _ in model.named_parameters(remove_duplicate=False)}
    names |= {name for name, _ in model.named_buffers(remove_duplicate=False)}
    return {name: device for name, device in device_map.items() if name in names}


def _check_device(name: object, device: object) -> None:
    if not isinstance(name, str):
        raise SettingsError(f"the device_map has the key {name!r}: keys are names of modules or tensors")
    if isinstance(device, bool) or not isinstance(device, int | str | torch.device):
        raise SettingsError(
            f"the device_map sends {name!r} to {device!r}, which is no device: write 0, 'cpu' or 'disk'"
        )
    try:
        if device != "disk":
            torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    except (RuntimeError, ValueError) as error:
        raise SettingsError(
            f"the device_map sends {name!r} to {device!r}, which is no device: write 0, 'cpu' or 'disk'"
        ) from error


def check_tied_parameters_on_same_device(
    tied_params: Iterable[Iterable[str]], device_map: Mapping[str, Device]
) -> None:
    """Warn of tied weights that a map sends to different devices: each then holds a copy of its own."""
    for group in tied_params:
        devices = {name: device_of(name, device_map) for name in group}
        if len(set(devices.values())) > 1:
            shown = some_of(f"{name} on {device}" for name, device in devices.items())
            _log.warning(
                "Tied weights are sent to different devices, where each has its own copy: %s.", shown
            )
