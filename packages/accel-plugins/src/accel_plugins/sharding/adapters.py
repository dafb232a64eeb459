"""Merge LoRA adapters of peft into full weights as they are gathered; the model stays as it is."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, TypeAlias

from torch import Tensor, nn

from accel_ops.modules import extract_model_from_parallel, replaced_attributes
from accel_plugins.full_parameters import FullParameters
from accel_plugins.sharding.state import strip_wrapper_prefixes
from accel_state.errors import UnsupportedError

Iterate: TypeAlias = "Callable[[FullParameters], Iterator[tuple[str, Tensor]]]"

_FACTORS = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B")
_WEIGHT = ".base_layer.weight"
_PREFIX = "base_model.model."  # of a PeftModel


def iter_merged(model: nn.Module, request: FullParameters, iterate: Iterate) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters that `merge_and_unload` would leave, under the names of the base model.

    `iterate` iterates over the full parameters of the model. The factors of all adapters are gathered first
    and kept; then all other parameters, in the dtype of the model, so that the sum is the same as peft's.
    """
    adapters = _find_adapters(extract_model_from_parallel(model, keep_torch_compile=False))

    def merge() -> Iterator[tuple[str, Tensor]]:
        # 1. Gather the factors.
        factors = {*adapters.factors}
        for name, tensor in iterate(replace(request, dtype=None, selects=factors.__contains__)):
            layer, kind, adapter = adapters.factors[name]
            layer.factors.setdefault(kind, {})[adapter] = tensor.clone()
        # 2. Gather the rest, and merge.
        others = replace(request, dtype=None, selects=lambda name: name not in factors)
        for name, tensor in iterate(others):
            if tensor.is_meta and request.values:
                raise UnsupportedError(
                    f"merge_adapters=True: {name!r} is offloaded. Load it into memory, or merge with peft."
                )
            bare = adapters.name_of(name)
            if bare is not None:
                layer = adapters.layers.get(name.removesuffix(_WEIGHT)) if name.endswith(_WEIGHT) else None
                merged = tensor if layer is None else layer.merge(tensor)
                yield bare, merged.to(request.dtype_of(tensor.dtype))

    return merge()


@dataclass(slots=True)
class _Layer:
    """A LoRA layer of peft, and the full factors of its adapters."""

    module: Any
    factors: dict[str, dict[str, Any]] = field(default_factory=dict[str, "dict[str, Any]"])

    def merge(self, weight: Tensor) -> Tensor:
        """Add the products of the active adapters' factors, as peft computes them."""
        active, full = self.adapters(), dict[str, Any](self.factors)
        for kind in full.keys() & {"lora_A", "lora_B"}:  # modules with a weight; of an embedding, the factors
            full[kind] = {name: SimpleNamespace(weight=factor) for name, factor in full[kind].items()}
        with replaced_attributes(self.module, full):
            for adapter in active:
                weight = (weight + self.module.get_delta_weight(adapter)).to(weight.dtype)
        return weight

    def adapters(self) -> list[str]:
        """Return the active adapters that are in the layer and not merged yet."""
        known = {*self.module.lora_A, *self.module.lora_embedding_A}
        return [
            name for name in self.module.active_adapters if name in known - {*self.module.merged_adapters}
        ]


@dataclass(slots=True)
class _Adapters:
    """The adapters of a model: layers by path, factors by name, and copies of fully trained modules."""

    layers: dict[str, _Layer] = field(default_factory=dict[str, _Layer])
    factors: dict[str, tuple[_Layer, str, str]] = field(default_factory=dict[str, "tuple[_Layer, str, str]"])
    copies: dict[str, str] = field(default_factory=dict[str, str])

    def name_of(self, name: str) -> str | None:
        """Return the name of a parameter in the merged base model; `None` if it is not there."""
        for path, adapter in self.copies.items():
            active = f"{path}.modules_to_save.{adapter}."
            if name.startswith(active):
                name = f"{path}.{name.removeprefix(active)}"
            elif name.startswith(f"{path}."):
                return None
        owner, is_inner, inner = name.rpartition(".base_layer.")
        return (f"{owner}.{inner}" if is_inner and owner in self.layers else name).removeprefix(_PREFIX)


def _find_adapters(core: nn.Module) -> _Adapters:
    adapters = _Adapters()
    peft: Any = sys.modules.get("peft")  # adapters exist only if it was imported
    missing = UnsupportedError(
        f"merge_adapters=True: {type(core).__name__} has no LoRA adapters of peft. Remove merge_adapters."
    )
    if peft is None:
        raise missing
    tuners: Any = sys.modules["peft.tuners.tuners_utils"]
    layers: Any = sys.modules["peft.tuners.lora.layer"]
    known = (layers.Linear, layers.Embedding, layers.Conv1d, layers.Conv2d, layers.Conv3d)
    for wrapped, module in core.named_modules():
        path = strip_wrapper_prefixes(f"{wrapped}.").removesuffix(".")
        part: Any = module
        if isinstance(part, peft.utils.ModulesToSaveWrapper):
            if part.active_adapters:
                adapters.copies[path] = part.active_adapters[0]
        elif isinstance(part, tuners.BaseTunerLayer):
            layer = adapters.layers[path] = _Layer(part)
            if not isinstance(part, known) or any(
                name in part.lora_variant or part.lora_bias.get(name) for name in layer.adapters()
            ):
                raise UnsupportedError(
                    f"merge_adapters=True: {path!r} has an adapter of {type(part).__name__} that is not a "
                    "plain product of two matrices (DoRA and biases are not). Read the parameters unmerged."
                )
            for kind in _FACTORS:
                for adapter, value in getattr(part, kind).items():
                    name = f"{path}.{kind}.{adapter}" + ("" if isinstance(value, nn.Parameter) else ".weight")
                    adapters.factors[name] = layer, kind, adapter
    if not adapters.layers:
        raise missing
    return adapters
