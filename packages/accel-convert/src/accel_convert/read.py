"""Open a checkpoint of any format: `open_checkpoint`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import count, takewhile
from typing import Any, cast

from accel_convert.adapters import is_adapter, merge_adapter
from accel_convert.contents import CheckpointContents, name_parameters
from accel_convert.deepspeed import read_engine_state, read_universal
from accel_convert.hub import with_names_of
from accel_convert.megatron import read_megatron
from accel_convert.stream import read_lazily
from accel_ops.weights.layout import SAFETENSORS_SUFFIX
from accel_ops.weights.lazy_tensors import LazyTensor, lazy_safetensors, lazy_torch_file
from accel_ops.weights.read import find_checkpoint_files
from accel_plugins.sharding.folder import read_index
from accel_plugins.sharding.state import INDEX_NAME, is_sharded_folder
from accel_state.errors import CheckpointError, SettingsError
from accel_state.remote import AnyPath
from accel_state.unpickling import load_safely
from accel_train.checkpoint import layout
from accel_train.checkpoint.layout import MODEL_KEY, OPTIMIZER_KEY, read_manifest


def open_checkpoint(
    path: AnyPath, base: AnyPath | None = None, *, on_hub: bool = False
) -> CheckpointContents:
    """Open a checkpoint and detect its format from its files; an adapter is merged into its base.

    With `base`, a checkpoint of a model of transformers gets the names and layouts that this model has in
    memory, or `on_hub`.

    Raises:
        SettingsError: It is an adapter and `base` is missing, or `base` has no configuration.
        CheckpointError: It has no known format, is damaged, or is of another model than `base`.
        FileNotFoundError: Nothing is at that path.
    """
    if (contents := read_megatron(path, base)) is not None:
        return contents
    if is_adapter(path):
        if base is None:
            raise SettingsError(f"{str(path)!r} is an adapter: pass its base model (base=, --base).")
        return merge_adapter(path, open_checkpoint(base))
    if base is not None:
        contents = open_checkpoint(path)
        with_names_of(base, contents, on_hub=on_hub)
        return contents
    if path.is_file():
        return _weights(path)
    if not path.is_dir():
        raise FileNotFoundError(f"no checkpoint at {str(path)!r}: no such file or folder")
    for read in READERS:
        if (contents := read(path)) is not None:
            return contents
    return _weights(path)


# States of `save_state`.


def _has(folder: AnyPath, name: str) -> bool:
    """Return whether a state has a file: one that its manifest lists, or any without a manifest."""
    manifest = read_manifest(folder)
    return (folder / name).is_file() if manifest is None else name in manifest.files


def _has_shards(folder: AnyPath, name: str) -> bool:
    return _has(folder, f"{name}/{INDEX_NAME}")


def _sharded_state(folder: AnyPath) -> CheckpointContents | None:
    """Read a sharded state of FSDP, Megatron, tensor, expert or pipeline parallelism: folders of shards."""
    contents = CheckpointContents(form="sharded state")
    for index in _numbers(lambda index: _has_shards(folder, layout.sharded_model_name(index))):
        name = layout.sharded_model_name(index)
        state = _shards(folder / name, contents)
        contents.models.append(contents.weights_in(state.get(MODEL_KEY, state), name))
    if not contents.models:
        return None
    for index in _numbers(lambda index: _has_shards(folder, layout.sharded_optimizer_name(index))):
        state = _shards(folder / layout.sharded_optimizer_name(index), contents)
        contents.optimizers.append(name_parameters(state.get(OPTIMIZER_KEY, state), {}, in_order=False))
    contents.add_state(folder)
    return contents


def _full_weights(folder: AnyPath, index: int) -> AnyPath | None:
    names = (name for name in layout.full_weights_names(index) if _has(folder, name))
    return next((folder / name for name in names), None)


def _full_state(folder: AnyPath) -> CheckpointContents | None:
    """Read a full state, written by rank 0."""
    names = (layout.MANIFEST_NAME, layout.optimizer_name(0), layout.rng_name(0))
    if _full_weights(folder, 0) is None or not any((folder / name).is_file() for name in names):
        return None
    contents = CheckpointContents(form="full state")
    paths: list[AnyPath] = []
    while (path := _full_weights(folder, len(paths))) is not None:
        paths.append(path)
    contents.models += [lazy_weights(path, contents) for path in paths]
    names = [*map(layout.optimizer_name, _numbers(lambda index: _has(folder, layout.optimizer_name(index))))]
    for index, name in enumerate(names):
        state = lazy_torch_file(folder / name, load=load_safely)
        if not isinstance(state, dict) or not {"state", "param_groups"} <= {*state}:
            contents.dropped.append(f"{name}: it is not the state of a torch optimizer")
            continue
        number = min(index, len(paths) - 1)
        weights = contents.models[number] if len(paths) in {1, len(names)} else {}
        # Other libraries sort the names of a safetensors file.
        in_order = (folder / layout.MANIFEST_NAME).is_file() or paths[number].suffix != SAFETENSORS_SUFFIX
        named = name_parameters(cast("dict[str, Any]", state), weights, in_order=in_order)
        contents.optimizers.append(named)
    contents.add_state(folder)
    return contents


# Folders of torch.distributed.checkpoint.


def _dcp(folder: AnyPath) -> CheckpointContents | None:
    """Read a DCP folder: a state dict, or a dictionary of a model's and an optimizer's."""
    if not is_sharded_folder(folder):
        return None
    contents = CheckpointContents(form="folder of torch.distributed.checkpoint")
    state = _shards(folder, contents)
    for key in _OPTIMIZER_KEYS & state.keys():
        part = state.pop(key)
        if isinstance(part, Mapping) and {"state", "param_groups"} <= {*part}:
            named = name_parameters(cast("Mapping[str, Any]", part), {}, in_order=False)
            contents.optimizers.append(named)
        else:
            contents.dropped.append(f"{key}: it has no 'state' and 'param_groups' of an optimizer")
    model = next((key for key in _MODEL_KEYS if isinstance(state.get(key), Mapping)), None)
    if model is not None:
        contents.dropped += [key for key in state if key != model]
        state = state[model]
    contents.models.append(contents.weights_in(state, str(folder)))
    return contents


_MODEL_KEYS = ("model", "model_state_dict", "state_dict", "module")
_OPTIMIZER_KEYS = {"optimizer", "optim", "optimizer_state_dict"}


def _shards(folder: AnyPath, contents: CheckpointContents) -> dict[str, Any]:
    state, refused = read_lazily(folder, read_index(folder))
    contents.dropped += [f"{folder.name}: {key}, an object that only code could build" for key in refused]
    return state


# Weights only.


def _weights(path: AnyPath) -> CheckpointContents:
    """Read files of weights, as transformers saves them."""
    checkpoint = find_checkpoint_files(path)
    is_safe = checkpoint.files[0].suffix == SAFETENSORS_SUFFIX
    contents = CheckpointContents(form="safetensors" if is_safe else "files of torch.save")
    by_file = {file: lazy_weights(file, contents) for file in checkpoint.files}
    weights = by_file[checkpoint.files[0]] if checkpoint.weight_map is None else {}
    for name, file in (checkpoint.weight_map or {}).items():
        if name not in by_file[file]:
            raise CheckpointError(f"{str(file)!r} has no {name!r}, which the index places there.")
        weights[name] = by_file[file][name]
    contents.models.append(weights)
    if path.is_dir():
        contents.add_files(path, {file.name for file in checkpoint.files}.__contains__)
        contents.state_files.clear()
    return contents


def lazy_weights(path: AnyPath, contents: CheckpointContents) -> dict[str, LazyTensor]:
    """Return the tensors of a safetensors file, or of one of `torch.save`."""
    if path.suffix == SAFETENSORS_SUFFIX:
        return lazy_safetensors(path)
    state = lazy_torch_file(path)
    if not isinstance(state, Mapping):
        raise CheckpointError(f"{str(path)!r} holds a {type(state).__name__!r}, not a state dict")
    return contents.weights_in(cast("Mapping[str, Any]", state), path.name)


def _numbers(is_there: Callable[[int], bool]) -> Iterator[int]:
    return takewhile(is_there, count())


READERS: list[Callable[[AnyPath], CheckpointContents | None]] = [
    read_universal,
    read_engine_state,
    _sharded_state,
    _dcp,
    _full_state,
]
"""Readers of folders, in the order in which they are tried; each returns `None` for another format."""
