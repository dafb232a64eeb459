"""Names and layouts of weights on the Hub: transformers 5 renames and merges tensors while it loads a model.

A mixture of experts has one tensor per expert in its files and one for all of them in memory. The model's
own conversion (`transformers.conversion_mapping`) is applied here tensor by tensor, in both directions.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

from torch import Tensor, nn


class Conversion:
    """Tensors that are converted together: by name, with the pattern of the converter that each matches."""

    def __init__(self, model: Any, converter: Any, name: str, renamings: Sequence[Any] = ()) -> None:
        self.parts: dict[str, str] = {}
        self.model = model
        self._converter, self._name, self._renamings = converter, name, renamings

    def run(self, tensor_of: Callable[[str], Tensor]) -> dict[str, Tensor]:
        """Return the converted tensors by name."""
        for name, pattern in self.parts.items():
            self._converter.add_tensor(self._name, name, pattern, tensor_of(name))
        results = self._converter.convert(self._name, model=self.model, config=self.model.config)
        library: Any = sys.modules["transformers.core_model_loading"]
        return {
            library.apply_renamings(name, self._renamings): value[0] if isinstance(value, list) else value
            for name, value in results.items()
        }


def from_hub(
    model: nn.Module, stored: Iterable[str], wanted: Mapping[str, Tensor]
) -> tuple[dict[str, str], list[Conversion]]:
    """Return which tensors of a checkpoint get another name, from old to new, and which are converted.

    The model then saves, here and in `save_pretrained`, with the names that its checkpoint has.

    Args:
        model: Any model; those of transformers 5 may have a conversion.
        stored: The names in the files.
        wanted: The tensors of the model.
    """
    renamed: dict[str, str] = {}
    groups: dict[str, Conversion] = {}
    transforms = _transforms(model, loading=True)
    if transforms:
        library: Any = sys.modules["transformers.core_model_loading"]
        renamings, converters, by_pattern = _by_kind(transforms)
        prefix = model.base_model_prefix
        for key in sorted(stored, key=library.dot_natural_key):
            name, pattern = library.rename_source_key(key, renamings, converters, prefix, wanted)
            if name not in wanted and key in wanted:
                continue  # saved under the name in the model
            if name in wanted and pattern is not None:
                group = groups.setdefault(name, Conversion(model, deepcopy(by_pattern[pattern]), name))
                group.parts[key] = pattern
            elif name in wanted and name != key:
                renamed[key] = name
        vars(model)["_weight_conversions"] = [entry for entry in transforms if entry.was_used()]
    return renamed, [*groups.values()]


class HubNames:
    """The names and layouts on the Hub of tensors of a model.

    Args:
        model: The unwrapped model.
        names: The names in the model.

    Attributes:
        order: The names, in the order in which `save_pretrained` writes them.
        renamed: The names of single tensors, by name in the model; empty if the model has no conversion.
        group_of: What is converted with a tensor, by name in the model.
    """

    def __init__(self, model: nn.Module, names: Iterable[str]) -> None:
        self.renamed: dict[str, str] = {}
        self.group_of: dict[str, Conversion] = {}
        self._model = model
        self._groups: dict[str, Conversion] = {}
        transforms = [entry.reverse_transform() for entry in _transforms(model, loading=False)[::-1]]
        self.is_needed = bool(transforms)
        self.order = [*names]
        if transforms:
            library: Any = sys.modules["transformers.core_model_loading"]
            self._renamings, self._converters, self._by_pattern = _by_kind(transforms)
            self.order.sort(key=library.dot_natural_key)
            for name in self.order:
                self.add(name)

    def add(self, name: str) -> None:
        """Add a name in the model."""
        library: Any = sys.modules["transformers.core_model_loading"]
        key, pattern = library.apply_converters(name, self._converters)
        if pattern is None:
            self.renamed[name] = library.apply_renamings(name, self._renamings)
            return
        if key not in self._groups:
            converter = deepcopy(self._by_pattern[pattern])
            self._groups[key] = Conversion(self._model, converter, key, self._renamings)
        self._groups[key].parts[name] = pattern
        self.group_of[name] = self._groups[key]


def to_hub(
    model: nn.Module, names: Iterable[str], parts: Iterable[Mapping[str, Tensor]]
) -> Iterator[Mapping[str, Tensor]]:
    """Yield a state dict with the names and layouts that it has on the Hub.

    A tensor is yielded when its part has arrived, or, if it is converted together with others, when the last
    of these has. A model without a conversion is yielded as it is.

    Args:
        model: The unwrapped model.
        names: The names in the parts. One that is missing here is converted at the end.
        parts: Parts of the state dict.
    """
    hub = HubNames(model, names)
    if not hub.is_needed:
        yield from parts
        return
    renamed, group_of = hub.renamed, hub.group_of
    tied = getattr(model, "all_tied_weights_keys", ())
    unplanned: set[Conversion | None] = set()
    arrived: dict[str, Tensor] = {}
    for part in parts:
        for name in (name for name in part if name not in renamed and name not in group_of):
            hub.add(name)
            unplanned.add(group_of.get(name))
        # The first name of a tied weight is kept: that of its source.
        ordered = sorted((name for name in part if name in renamed), key=tied.__contains__)
        yield {renamed[name]: part[name] for name in ordered}
        for name in (name for name in part if name in group_of):
            arrived[name] = part[name]
            group = group_of[name]
            if group not in unplanned and group.parts.keys() <= arrived.keys():
                yield group.run(arrived.pop)
    for group in dict.fromkeys(group_of.values()):
        group.parts = {name: pattern for name, pattern in group.parts.items() if name in arrived}
        if group.parts:
            yield group.run(arrived.pop)


def _by_kind(transforms: list[Any]) -> tuple[list[Any], list[Any], dict[str, Any]]:
    """Return the renamings, the converters, and the converters by pattern."""
    library: Any = sys.modules["transformers.core_model_loading"]
    renamings = [entry for entry in transforms if isinstance(entry, library.WeightRenaming)]
    converters = [entry for entry in transforms if isinstance(entry, library.WeightConverter)]
    return renamings, converters, {name: entry for entry in converters for name in entry.source_patterns}


def _transforms(model: Any, *, loading: bool) -> list[Any]:
    """Return the conversion that transformers 5 has for a model, in the order of loading."""
    mapping: Any = sys.modules.get("transformers.conversion_mapping")
    if mapping is None or not isinstance(model, sys.modules["transformers"].PreTrainedModel):
        return []
    if not loading and getattr(model, "_hf_peft_config_loaded", False):
        return []  # its adapters are among the names, as in save_pretrained
    if not loading and getattr(model, "_weight_conversions", None) is not None:
        return model._weight_conversions  # that of the files from which it was loaded
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    sharded = [module for module in model.modules() if fsdp and isinstance(module, fsdp.FSDPModule)]
    classes = [type(module) for module in sharded]
    try:  # transformers knows a model by its class, which FSDP2 replaced by a subclass
        for module, cls in zip(sharded, classes, strict=True):
            module.__class__ = cls.__mro__[2]
        transforms = mapping.get_model_conversion_mapping(model, add_legacy=loading)
    finally:
        for module, cls in zip(sharded, classes, strict=True):
            module.__class__ = cls
    if loading:
        return transforms
    # As save_pretrained does: whether files of this model have such a prefix is not known.
    library: Any = sys.modules["transformers.core_model_loading"]
    return [entry for entry in transforms if not isinstance(entry, library.PrefixChange)]
