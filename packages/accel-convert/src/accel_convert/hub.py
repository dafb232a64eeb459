"""Names and layouts of a model of transformers, on the Hub and in memory: `with_names_of`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from accel_bigmodel.recording import record_conversion
from accel_convert.contents import CheckpointContents
from accel_ops.weights.hub_names import Conversion, HubNames, from_hub
from accel_ops.weights.lazy_tensors import LazyTensor
from accel_state.errors import CheckpointError, MissingDependencyError, SettingsError, some_of
from accel_state.remote import AnyPath


def with_names_of(base: AnyPath, contents: CheckpointContents, *, on_hub: bool) -> None:
    """Convert the weights of the first model to the names and layouts that transformers has for them.

    Args:
        base: A folder with the configuration of the model, whose code is in transformers.
        contents: A checkpoint with names of the Hub, or with those in memory.
        on_hub: Whether to write the names of the Hub, as `save_pretrained` does, or those in memory.

    Raises:
        SettingsError: There is no such configuration.
        CheckpointError: The checkpoint lacks tensors of the model, or has some of another shape.
    """
    model = _meta_model(base)
    wanted: dict[str, Tensor] = model.state_dict()
    found = contents.models[0]
    renamed, conversions = from_hub(model, found, wanted)
    weights = _converted(found, renamed, {name: group for group in conversions for name in group.parts})
    tied: Mapping[str, str] = model.all_tied_weights_keys
    for name, source in tied.items():
        if name in weights and source not in weights:
            weights[source] = weights.pop(name)
    missing = [name for name in wanted if name not in weights and tied.get(name) not in weights]
    differing = [name for name in wanted if name in weights and weights[name].shape != wanted[name].shape]
    if missing or differing:
        how = "lacks" if missing else "has another shape of"
        raise CheckpointError(
            f"The checkpoint {how} {some_of(missing or differing)}, of {type(model).__name__} with the "
            f"configuration in {str(base)!r}."
        )
    contents.dropped += [f"{name}, which the model does not have" for name in weights.keys() - wanted.keys()]
    weights = {name: weights[name] for name in wanted if name in weights}
    if on_hub:
        doubled = [name for name in weights if tied.get(name) in weights]
        contents.dropped += [f"{name}, the same tensor as {tied[name]}" for name in doubled]
        model._weight_conversions = None  # those of a new model, whatever the names of the source were
        hub = HubNames(model, (name for name in weights if name not in doubled))
        weights = _converted({name: weights[name] for name in hub.order}, hub.renamed, hub.group_of)
    contents.models[0] = weights
    contents.config_files |= config_files(base)


def load_config(base: AnyPath) -> Any:
    """Return the configuration of transformers in a folder.

    Raises:
        SettingsError: There is none, or the folder is on a store.
        MissingDependencyError: transformers is not installed.
    """
    try:
        transformers: Any = import_module("transformers")
    except ImportError as error:
        raise MissingDependencyError(
            "base= reads a configuration of transformers: run `pip install transformers`"
        ) from error
    if not isinstance(base, Path):
        raise SettingsError(f"base={str(base)!r} is on a store; give a local folder.")
    try:
        return transformers.AutoConfig.from_pretrained(
            str(base), local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError) as error:
        raise SettingsError(
            f"base={str(base)!r} has no configuration of transformers: {str(error).splitlines()[0]}"
        ) from error


def config_files(base: AnyPath) -> dict[str, AnyPath]:
    """Return the files in a folder that describe a model: its configuration and tokenizer."""
    suffixes = {".json", ".txt", ".model", ".jinja"}
    return {
        path.name: path
        for path in base.iterdir()
        if path.suffix in suffixes and not path.name.endswith(".index.json")
    }


def _meta_model(base: AnyPath) -> Any:
    config = load_config(base)
    names = config.architectures or [""]
    cls = getattr(import_module("transformers"), names[0], None)
    if cls is None:
        raise SettingsError(
            f"base={str(base)!r} has architectures={config.architectures!r} in config.json, which is no "
            "class of transformers."
        )
    with torch.device("meta"):
        return cls(config)


def _converted(
    weights: Mapping[str, LazyTensor], renamed: Mapping[str, str], group_of: Mapping[str, Conversion]
) -> dict[str, LazyTensor]:
    made: dict[str, LazyTensor] = {}
    done: set[Conversion] = set()
    for name, lazy in weights.items():
        group = group_of.get(name)
        if group is None:
            made[renamed.get(name, name)] = lazy
        elif group not in done:
            done.add(group)
            made |= _lazily(group, weights)
    return made


def _lazily(group: Conversion, weights: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
    """Convert tensors when the results are read: for a chunk, only what it needs of them is read."""
    tensors = {name: weights[name] for name in group.parts}
    parts = {name: (lazy.shape, lazy.dtype, partial(_read_part, lazy)) for name, lazy in tensors.items()}
    recording, results = record_conversion(group, parts)

    def read(name: str, begin: int, end: int) -> Tensor:
        rows = slice(begin, end)
        if recording.is_complete:
            part = recording.read(results[name], [rows, *map(partial(slice, 0), results[name].shape[1:])])
        else:
            part = group.run(lambda key: weights[key].full())[name][rows]
        return part.clone(memory_format=torch.contiguous_format)

    return {
        name: LazyTensor(shape=tuple(value.shape), dtype=value.dtype, read=partial(read, name))
        for name, value in results.items()
    }


def _read_part(lazy: LazyTensor, region: Sequence[slice]) -> Tensor:
    return lazy.read(region[0].start, region[0].stop)[(slice(None), *region[1:])]
