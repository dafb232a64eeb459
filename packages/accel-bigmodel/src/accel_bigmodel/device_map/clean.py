"""Shorten a device map: modules that lie wholly on one device are named once."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def clean_device_map(
    device_map: dict[str, int | str | torch.device], module_name: str = ""
) -> dict[str, int | str | torch.device]:
    """Replace, in place, the entries of modules that lie wholly on one device by one entry.

    Args:
        device_map: Names of modules and tensors to devices.
        module_name: Look only below this module; everywhere by default.

    Example:
        >>> clean_device_map({"a.x": 0, "a.y": 0, "b.x": 0, "b.y": "cpu"})
        {'b.x': 0, 'b.y': 'cpu', 'a': 0}
    """
    prefix = f"{module_name}." if module_name else ""
    names = [name for name in device_map if name.startswith(prefix)]
    devices = {device_map[name] for name in names}
    if len(devices) == 1 and len(names) > 1:
        for name in names:
            del device_map[name]
        device_map[module_name] = devices.pop()
        return device_map
    children = dict.fromkeys(name.removeprefix(prefix).partition(".")[0] for name in names)
    for child in children:
        if f"{prefix}{child}" not in device_map:
            clean_device_map(device_map, f"{prefix}{child}")
    return device_map
