"""Load a model with quantised weights, tensor by tensor."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from accel_bigmodel.device_map import automatic_device_map
from accel_bigmodel.dispatch import dispatch_model
from accel_bigmodel.hooks import default_device
from accel_bigmodel.load import Assignment, load_weights
from accel_bigmodel.placement import model_tensors, owner_of
from accel_bigmodel.sources import Source, open_checkpoint
from accel_ops.weights.read import entry_of
from accel_ops.weights.tensors import find_tied_parameters, retie_parameters
from accel_quant.layers import (
    WEIGHT_FORMAT,
    Quantizer,
    bitsandbytes,
    check_shape,
    default_skipped,
    is_listed,
    register_slots,
)
from accel_state.errors import SettingsError
from accel_state.platforms import trim_heap

if TYPE_CHECKING:
    from accel_quant.config import BnbQuantizationConfig

    Device = int | str | torch.device

_log = logging.getLogger(__name__)
_TRIM_AFTER = 64 << 20


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
    """Quantise the linear layers of a model, from its weights or from a checkpoint.

    Each weight is quantised when it is read and its float form dropped: memory holds the quantised model and
    one tensor. A quantised checkpoint is loaded without changes. Offloaded layers keep only the scales of
    their weights on the device.

    Args:
        model: A loaded model, or a meta model, which needs `weights_location`.
        bnb_quantization_config: The modules to quantise, and the options.
        weights_location: A weight file, an index file, a folder with one of them, or the id of a model on
            the hub.
        device_map: Module or tensor name to device, or a kind of map to infer (`"auto"` …); by default the
            accelerator, or the CPU if there is none.
        no_split_module_classes: Classes whose modules an inferred map does not split.
        max_memory: The limit of each device for an inferred map.
        offload_folder: The folder of weights for the disk.
        offload_state_dict: No effect: weights are never in memory together. `True` is accepted for a meta
            model, but not for a loaded model, whose weights are in memory already.

    Returns:
        The model, changed in place.

    Raises:
        CheckpointError: The checkpoint is damaged, or has no value for a tensor of the model.
        MissingDependencyError: bitsandbytes is not installed.
        SettingsError: There are no weights, or weights for the disk have no folder.
    """
    # 1. Check the arguments, and replace linear layers by quantised layers.
    config = bnb_quantization_config
    is_empty = any(parameter.is_meta for parameter in model.parameters())
    if is_empty and weights_location is None:
        raise SettingsError("the model is on the meta device: pass weights_location, its checkpoint")
    if offload_state_dict and not is_empty:
        raise SettingsError(
            "offload_state_dict=True is for a meta model, but this model's weights are already in memory"
        )
    quantizer = Quantizer(config=config, bnb=bitsandbytes())
    register_slots()
    tied = find_tied_parameters(model)
    skipped = default_skipped(model) if config.skip_modules is None else list(config.skip_modules)
    unquantized = list(config.keep_in_fp32_modules or ())
    replaced = quantizer.replace_linears(model, [*skipped, *unquantized])
    if not replaced:
        _log.warning("No linear layer was quantised: all are in skip_modules or keep_in_fp32_modules.")
    # 2. Choose the dtypes of the other tensors, and the devices.
    layers = frozenset(replaced)
    types = _types(model, replaced, unquantized, config)
    if device_map is None:
        plan: dict[str, Device] = {"": default_device()}
    elif isinstance(device_map, str):
        sizes = {**types, **{f"{layer}.weight": config.target_dtype for layer in layers}}
        plan = dict(
            automatic_device_map(device_map, model, max_memory, no_split_module_classes, special_dtypes=sizes)
        )
    else:
        plan = dict(device_map)
    # 3. Quantise the model's weights, or the weights of a checkpoint as they are read.
    if weights_location is None:
        sources = [_OwnWeights(model, replaced)]
    else:
        replaced.clear()
        sources = open_checkpoint(weights_location)
    assignment = Assignment(
        device_map=plan,
        offload_folder=offload_folder,
        dtypes=types,
        quantizer=QuantizedWeights(model=model, quantizer=quantizer, layers=layers),
    )
    index = load_weights(model, sources, assignment)
    # 4. Tie weights again, and dispatch the model to its devices. peft and others read what it is.
    retie_parameters(model, tied)
    vars(model).update(is_loaded_in_8bit=config.load_in_8bit, is_loaded_in_4bit=config.load_in_4bit)
    return dispatch_model(
        model,
        plan,
        offload_dir=offload_folder if any("safetensors_file" not in row for row in index.values()) else None,
        offload_index=index,
    )


@dataclass(kw_only=True)
class QuantizedWeights:
    """The weights of a model's quantised layers; an `accel_bigmodel.load.WeightQuantizer`."""

    model: nn.Module
    quantizer: Quantizer
    layers: frozenset[str]
    _passed: int = 0

    def weight_of(self, name: str) -> str | None:
        layer = entry_of(name, self.layers)
        return None if layer is None else f"{layer}.weight"

    def quantize_parts(
        self, weight: str, parts: Mapping[str, Tensor], device: torch.device, *, where: str
    ) -> nn.Parameter:
        layer: Any = self.model.get_submodule(weight.removesuffix(".weight"))
        value = parts[weight]
        if value.is_floating_point():
            check_shape(f"{where}: the weight {weight!r}", value, (layer.out_features, layer.in_features))
            # Quantising fragments memory: release freed blocks now and then.
            self._passed += value.nbytes
            if self._passed > _TRIM_AFTER:
                self._passed = 0
                trim_heap()
            return self.quantizer.quantize(value, device, layer)
        prefix = weight.removesuffix("weight")
        statistics = {
            name.removeprefix(prefix).removeprefix("weight."): part
            for name, part in parts.items()
            if name != weight and not name.endswith(WEIGHT_FORMAT)
        }
        where = f"{where}: the quantised weight {weight!r}"
        return self.quantizer.restore(value, statistics, device, layer, where=where)

    def with_numbers(self, parameter: nn.Parameter, numbers: Tensor) -> nn.Parameter:
        attributes = dict(vars(parameter))
        if "CB" in attributes:
            attributes["CB"] = numbers
        kind: Any = type(parameter)
        return kind(numbers, requires_grad=False, **attributes)


class _OwnWeights(Source):
    """The weights of a loaded model, including replaced layers; each weight is dropped once it is read."""

    path = Path("the model")
    mapped = True

    def __init__(self, model: nn.Module, replaced: dict[str, nn.Linear]) -> None:
        self._replaced = replaced
        self._model = model
        tensors = model_tensors(model) | {
            f"{layer}.weight": linear.weight for layer, linear in replaced.items()
        }
        self.tensors = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}

    def get(self, name: str) -> Tensor:
        linear = self._replaced.pop(name.removesuffix(".weight"), None)
        owner, leaf = owner_of(self._model, name)
        return (getattr(owner, leaf) if linear is None else linear.weight).detach()


def _types(
    model: nn.Module, layers: Collection[str], unquantized: Sequence[str], config: BnbQuantizationConfig
) -> dict[str, torch.dtype]:
    """Return the dtypes of all floating-point tensors that are not quantised."""
    types: dict[str, torch.dtype] = {}
    default: Any = config.torch_dtype
    for name, tensor in model_tensors(model).items():
        module = name.rpartition(".")[0]
        if tensor.is_floating_point() and not (module in layers and name == f"{module}.weight"):
            types[name] = torch.float32 if is_listed(module, unquantized) else default
    return types
