"""Device maps of quantised models."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel_bigmodel.device_map.budget import get_balanced_memory
from accel_bigmodel.device_map.infer import infer_auto_device_map
from accel_bigmodel.hooks.offload import default_device
from accel_state.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    import torch
    from torch import nn

    from accel_quant.bnb.config import BnbQuantizationConfig

    Device = int | str | torch.device

_AUTOMATIC = ("auto", "balanced", "balanced_low_0", "sequential")


def quantized_device_map(
    model: nn.Module,
    device_map: str | Mapping[str, Device] | None,
    config: BnbQuantizationConfig,
    layers: Collection[str],
    *,
    types: Mapping[str, torch.dtype],
    max_memory: Mapping[int | str, float | str] | None,
    no_split: str | Sequence[str] | None,
) -> dict[str, Device]:
    """Make a device map that counts quantised weights at their size.

    Args:
        model: The model, with its quantised layers in place.
        device_map: A map, which is taken as it is; how to make one; or `None` for all on the accelerator,
            or on the CPU if there is none.
        config: How it is quantised.
        layers: The names of its quantised layers.
        types: The types of its other tensors.
        max_memory: What each device may take when a map is made.
        no_split: Classes whose modules stay whole when a map is made.

    Raises:
        SettingsError: `device_map` is a text that means nothing.
    """
    if device_map is None:
        return {"": default_device()}
    if not isinstance(device_map, str):
        return dict(device_map)
    if device_map not in _AUTOMATIC:
        raise SettingsError(
            f"device_map is {device_map!r}: write one of {', '.join(map(repr, _AUTOMATIC))}, or a mapping"
        )
    special = {**types, **{f"{layer}.weight": config.target_dtype for layer in layers}}
    if device_map != "sequential":
        max_memory = get_balanced_memory(
            model,
            max_memory,
            no_split,
            special_dtypes=special,
            low_zero=device_map == "balanced_low_0",
        )
    return dict(infer_auto_device_map(model, max_memory, no_split, special_dtypes=special))
