"""Device maps of quantised models."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel_bigmodel.device_map.infer import automatic_device_map
from accel_bigmodel.hooks.offload import default_device

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    import torch
    from torch import nn

    from accel_quant.bnb.config import BnbQuantizationConfig

    Device = int | str | torch.device


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

    A mapping is taken as it is; without a map all is on the accelerator, or on the CPU if there is none.

    Raises:
        SettingsError: `device_map` is a text that means nothing.
    """
    if device_map is None:
        return {"": default_device()}
    if not isinstance(device_map, str):
        return dict(device_map)
    special = {**types, **{f"{layer}.weight": config.target_dtype for layer in layers}}
    return dict(automatic_device_map(device_map, model, max_memory, no_split, special_dtypes=special))
