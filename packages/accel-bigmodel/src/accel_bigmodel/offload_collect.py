"""Collect the offloaded weights of a model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_bigmodel.offload import (
    OffloadedWeightsLoader,
    extract_submodules_state_dict,
    offload_state_dict,
)
from accel_bigmodel.offload_index import read_offload_index
from accel_bigmodel.placement import sites_of
from accel_ops.weights.names import OFFLOAD_INDEX_NAME
from accel_state.errors import SettingsError, some_of

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence

    import torch
    from torch import Tensor, nn

    Device = int | str | torch.device


def collect_weights(
    model: nn.Module,
    device_map: Mapping[str, Device],
    offload: Mapping[str, bool],
    tied: Sequence[Sequence[str]],
    *,
    state_dict: Mapping[str, Tensor] | None,
    offload_dir: str | os.PathLike[str] | None,
    offload_index: Mapping[str, Mapping[str, Any]] | None,
    offload_buffers: bool,
) -> OffloadedWeightsLoader | None:
    """Collect the offloaded weights, writing to the disk what is not there yet.

    Raises:
        SettingsError: Weights are to go to the disk, and there is no folder for them.
    """
    on_cpu = [name for name, device in device_map.items() if offload[name] and device != "disk"]
    on_disk = [name for name, device in device_map.items() if device == "disk"]
    if not on_cpu and not on_disk:
        return None
    resident = _resident_tensors(model, buffers=offload_buffers)
    candidates = extract_submodules_state_dict(resident, on_cpu) if state_dict is None else state_dict
    held = {name: tensor for name, tensor in candidates.items() if not tensor.is_meta}
    index: dict[str, Mapping[str, Any]] = _read_index(offload_dir)
    index.update(offload_index or {})
    _resolve_prefixes(tied, on_disk, held, index)
    to_write = {
        name: tensor
        for name, tensor in extract_submodules_state_dict(resident, on_disk).items()
        if name not in index and name not in held and not tensor.is_meta
    }
    if to_write and offload_dir is None:
        raise SettingsError(
            f"the device_map sends {some_of(map(repr, on_disk))} to the disk: pass offload_dir, "
            "the folder for their weights, or offload_index, where they lie"
        )
    if to_write and offload_dir is not None:
        offload_state_dict(offload_dir, to_write)
        index = {**_read_index(offload_dir), **index}
    _resolve_tied(tied, resident, held, index)
    return OffloadedWeightsLoader(state_dict=held, save_folder=offload_dir, index=index)


def _resident_tensors(model: nn.Module, *, buffers: bool) -> dict[str, Tensor]:
    sites = sites_of(model).items()
    return {
        name: site.table[site.leaf].data
        for name, site in sites
        if not site.is_buffer or (buffers and site.persistent)
    }


def _read_index(folder: str | os.PathLike[str] | None) -> dict[str, Mapping[str, Any]]:
    if folder is None or not (Path(folder) / OFFLOAD_INDEX_NAME).is_file():
        return {}
    return dict(read_offload_index(folder))


def _resolve_prefixes(
    tied: Sequence[Sequence[str]],
    on_disk: Sequence[str],
    held: Mapping[str, Tensor],
    index: dict[str, Mapping[str, Any]],
) -> None:
    """Read a tied weight that goes to the disk where the checkpoint has it under another name."""
    prefixes = tuple(f"{name}." if name else "" for name in on_disk)
    for group in tied:
        source = next((name for name in group if index.get(name, {}).get("safetensors_file")), None)
        for name in group:
            moves = name in on_disk or name.startswith(prefixes)
            if moves and source is not None and name not in held and name not in index:
                index[name] = {"weight_name": source, **index[source]}


def _resolve_tied(
    tied: Sequence[Sequence[str]],
    resident: Mapping[str, Tensor],
    held: dict[str, Tensor],
    index: dict[str, Mapping[str, Any]],
) -> None:
    for group in tied:
        unresolved = [name for name in group if name not in held and name not in index]
        source = next((name for name in group if name in held or name in index), None)
        real = next(
            (resident[name] for name in group if name in resident and not resident[name].is_meta), None
        )
        for name in unresolved:
            if real is not None:
                held[name] = real
            elif source in held:
                held[name] = held[source]
            elif source is not None and index[source].get("safetensors_file"):
                index[name] = {"weight_name": source, **index[source]}
