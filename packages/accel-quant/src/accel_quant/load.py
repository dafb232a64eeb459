"""Load a model with quantised weights, tensor by tensor."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from accel_bigmodel.device_map import automatic_device_map
from accel_bigmodel.dispatch import dispatch_model
from accel_bigmodel.hooks import default_device
from accel_bigmodel.host_to_device import trim_heap
from accel_bigmodel.offload import load_offloaded_weight, offload_weight, save_offload_index
from accel_bigmodel.placement import set_module_tensor_to_device, sites_of
from accel_bigmodel.sources import open_checkpoint
from accel_ops.weights.read import device_of
from accel_ops.weights.tensors import find_tied_parameters, retie_parameters
from accel_quant.layers import (
    STATE_8BIT,
    WEIGHT_FORMAT,
    Quantizer,
    bitsandbytes,
    check_shape,
    default_skipped,
    is_listed,
    register_slots,
)
from accel_state.errors import CheckpointError, SettingsError

if TYPE_CHECKING:
    from accel_bigmodel.offload import Index
    from accel_quant.config import BnbQuantizationConfig

    Device = int | str | torch.device

_log = logging.getLogger(__name__)
_TIDY_AFTER = 64 << 20


def load_and_quantize_model(
    model: nn.Module,
    bnb_quantization_config: BnbQuantizationConfig,
    weights_location: str | os.PathLike[str] | None = None,
    device_map: str | Mapping[str, Device] | None = None,
    no_split_module_classes: str | Sequence[str] | None = None,
    max_memory: Mapping[int | str, float | str] | None = None,
    offload_folder: str | os.PathLike[str] | None = None,
    offload_state_dict: bool = False,
) -> nn.Module:
    """Quantise the linear layers of a model, from its own weights or from a checkpoint.

    Each weight is quantised as it is read and its float form dropped: memory holds the quantised model and
    one tensor. A checkpoint of a quantised model is loaded as it is. Offloaded layers keep only the scales
    of their weights on the device.

    Args:
        model: A loaded model, or a meta model, which needs `weights_location`.
        bnb_quantization_config: What to quantise, and how.
        weights_location: A weight file, an index file, a folder with one of them, or the id of a model on
            the hub.
        device_map: Module or tensor name to device, or how to make a map (`"auto"` …); by default all on the
            accelerator, or on the CPU if there is none.
        no_split_module_classes: Classes whose modules stay whole when a map is made.
        max_memory: What each device may take when a map is made.
        offload_folder: Where weights for the disk are written.
        offload_state_dict: Nothing to do here: weights are never in memory together. `True` is accepted for a
            meta model, and refused for a loaded model, whose weights are in memory already.

    Returns:
        The model, changed in place.

    Raises:
        CheckpointError: The checkpoint is damaged, or has no value for a tensor of the model.
        MissingDependencyError: bitsandbytes is not installed.
        SettingsError: There are no weights, or weights for the disk have no folder.
    """
    config = bnb_quantization_config
    _refuse(model, weights_location, offload_state_dict=offload_state_dict)
    quantizer = Quantizer(config=config, bnb=bitsandbytes())
    register_slots()
    tied = find_tied_parameters(model)
    skipped = default_skipped(model) if config.skip_modules is None else list(config.skip_modules)
    unquantized = list(config.keep_in_fp32_modules or ())
    replaced = quantizer.replace_linears(model, [*skipped, *unquantized])
    if not replaced:
        _log.warning("No linear layer was quantised: all are in skip_modules or keep_in_fp32_modules.")
    types = _types(model, replaced, unquantized, config)
    plan = quantized_device_map(
        model,
        device_map,
        config,
        replaced,
        types=types,
        max_memory=max_memory,
        no_split=no_split_module_classes,
    )
    loader = _Loader(
        model=model,
        quantizer=quantizer,
        plan=plan,
        types=types,
        layers=frozenset(replaced),
        folder=offload_folder,
    )
    loader.fill(replaced, weights_location, tied)
    retie_parameters(model, tied)
    return dispatch_model(model, plan, offload_dir=offload_folder if loader.index else None)


def _refuse(
    model: nn.Module, weights_location: str | os.PathLike[str] | None, *, offload_state_dict: bool
) -> None:
    empty = any(parameter.is_meta for parameter in model.parameters())
    if empty and weights_location is None:
        raise SettingsError("the model is on the meta device: pass weights_location, its checkpoint")
    if offload_state_dict and not empty:
        raise SettingsError(
            "offload_state_dict=True is for a meta model; this model's weights are in memory already"
        )


@dataclass(kw_only=True)
class _Loader:
    """Place tensors as they are read, quantised or not."""

    model: nn.Module
    quantizer: Quantizer
    plan: Mapping[str, Device]
    types: Mapping[str, torch.dtype]
    layers: frozenset[str]
    folder: str | os.PathLike[str] | None
    index: Index = field(default_factory=dict[str, dict[str, Any]])
    _passed: int = 0
    _seen: set[str] = field(default_factory=set[str])
    _waiting: dict[str, Tensor] = field(default_factory=dict[str, "Tensor"])
    _statistics: dict[str, dict[str, Tensor]] = field(default_factory=dict[str, "dict[str, Tensor]"])

    def fill(
        self,
        replaced: dict[str, nn.Linear],
        checkpoint: str | os.PathLike[str] | None,
        tied: Sequence[Sequence[str]],
    ) -> None:
        """Take the model's own weights, or a checkpoint's; note those on the disk."""
        if checkpoint is None:
            self.take(_resident_weights(self.model, replaced), "the model")
        else:
            replaced.clear()
            for source in open_checkpoint(checkpoint):
                tensors = ((name, source.get(name)) for name in source.tensors)
                self.take(tensors, repr(str(source.path)))
            self.check(tied)
        if self.index and self.folder is not None:
            save_offload_index(self.index, self.folder)

    def take(self, tensors: Iterator[tuple[str, Tensor]], origin: str) -> None:
        """Place tensors; the parts of a saved quantised weight wait for each other."""
        sites = sites_of(self.model)
        for name, value in tensors:
            layer = self._layer_of(name)
            if layer is not None and name == f"{layer}.weight":
                if value.is_floating_point():
                    owner: Any = self.model.get_submodule(layer)
                    shape = owner.out_features, owner.in_features
                    check_shape(f"{origin}: the weight {name!r}", value, shape)
                    device = self._device(f"{layer}.weight")
                    self._put(layer, self.quantizer.quantize(value, device, owner))
                    self._tidy(value.nbytes)
                else:
                    self._waiting[layer] = value
            elif layer is not None and name not in sites:
                if not name.endswith(WEIGHT_FORMAT):
                    self._statistics.setdefault(layer, {})[self._part(layer, name)] = value
            elif name in sites:
                self._plain(name, value)
            else:
                _log.warning("Unexpected in the checkpoint: %s.", name)
        for layer in [layer for layer in self._waiting if layer in self._statistics]:
            packed, statistics = self._waiting.pop(layer), self._statistics.pop(layer)
            owner = self.model.get_submodule(layer)
            name = f"{layer}.weight"
            where = f"{origin}: the quantised weight {name!r}"
            self._put(
                layer, self.quantizer.restore(packed, statistics, self._device(name), owner, where=where)
            )

    def check(self, tied: Sequence[Sequence[str]]) -> None:
        """Refuse a checkpoint that left a tensor without a value."""
        served = {name for group in tied if self._seen.intersection(group) for name in group}
        sites = sites_of(self.model).items()
        missing = [n for n, site in sites if site.persistent and n not in self._seen and n not in served]
        if missing or self._waiting:
            names = ", ".join([*missing, *(f"{layer}'s scales" for layer in self._waiting)][:20])
            raise CheckpointError(f"the checkpoint does not fit the model: it lacks {names}")

    def _layer_of(self, name: str) -> str | None:
        prefix = name.rpartition(".")[0]
        while prefix:
            if prefix in self.layers:
                return prefix
            prefix = prefix.rpartition(".")[0]
        return None

    def _tidy(self, passed: int) -> None:
        """Trim the heap now and then: quantising leaves freed blocks between kept ones."""
        self._passed += passed
        if self._passed > _TIDY_AFTER:
            self._passed = 0
            trim_heap()

    def _part(self, layer: str, name: str) -> str:
        part = name.removeprefix(f"{layer}.")
        return STATE_8BIT if part == STATE_8BIT else part.removeprefix("weight.")

    def _device(self, name: str) -> torch.device:
        device = device_of(name, self.plan)
        return torch.device("cpu" if device in (None, "disk") else device)  # pyright: ignore[reportArgumentType] - None is excluded

    def _put(self, layer: str, weight: nn.Parameter) -> None:
        name = f"{layer}.weight"
        owner: Any = self.model.get_submodule(layer)
        self._seen.add(name)
        if device_of(name, self.plan) == "disk":
            self._write(name, weight.data)
            # The numbers are read back in place; the scales stay with the parameter.
            weight = _mapped(weight, Path(str(self.folder)), name, self.index)
        owner.weight = weight

    def _plain(self, name: str, value: Tensor) -> None:
        self._seen.add(name)
        dtype = self.types.get(name) if value.is_floating_point() else None
        device = device_of(name, self.plan)
        set_module_tensor_to_device(
            self.model, name, self._device(name), value=value, dtype=dtype, clear_cache=False
        )
        site = sites_of(self.model.get_submodule(name.rpartition(".")[0]))[name.rpartition(".")[2]]
        if device == "disk" and not site.is_buffer:
            self._write(name, site.table[site.leaf].data)

    def _write(self, name: str, value: Tensor) -> None:
        if self.folder is None:
            raise SettingsError(f"the device_map sends {name!r} to the disk: pass offload_folder")
        Path(self.folder).mkdir(parents=True, exist_ok=True)
        offload_weight(value, name, self.folder, self.index)


def _mapped(weight: Any, folder: Path, name: str, index: Index) -> Any:
    value = load_offloaded_weight(folder / f"{name}.dat", index[name])
    unquantized = dict(vars(weight))
    if "CB" in unquantized:
        unquantized["CB"] = value
    return type(weight)(value, requires_grad=False, **unquantized)


def _resident_weights(model: nn.Module, replaced: dict[str, nn.Linear]) -> Iterator[tuple[str, Tensor]]:
    """Return the weights of a loaded model, each replaced layer dropped as soon as it was given."""
    for name, site in sites_of(model).items():
        layer = name.rpartition(".")[0]
        if layer in replaced and name == f"{layer}.weight":
            yield name, replaced.pop(layer).weight.detach()
        else:
            yield name, site.table[site.leaf].detach()


def _types(
    model: nn.Module,
    layers: Mapping[str, nn.Linear],
    unquantized: Sequence[str],
    config: BnbQuantizationConfig,
) -> dict[str, torch.dtype]:
    """Return the dtypes of all floating tensors that are not quantised."""
    types: dict[str, torch.dtype] = {}
    default: Any = config.torch_dtype
    for name, site in sites_of(model).items():
        module = name.rpartition(".")[0]
        if site.table[site.leaf].is_floating_point() and not (
            module in layers and name == f"{module}.weight"
        ):
            types[name] = torch.float32 if is_listed(module, unquantized) else default
    return types


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
