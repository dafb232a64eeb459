"""Plan the files of a checkpoint in each format: `WRITERS`."""

from __future__ import annotations

import json
import pickle
import shutil
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field
from functools import partial
from pathlib import Path, PurePath
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata

from accel_convert.contents import CheckpointContents, Label, OptimizerContents, is_lazy, lazy_of, leaves
from accel_convert.deepspeed import MODEL_FILES, UNIVERSAL_TAG_FILE
from accel_convert.stream import Chunks, write_shards
from accel_ops.tree import recursively_apply
from accel_ops.weights.layout import (
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_PATTERN_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_PATTERN_NAME,
    fill_shards,
    numbered,
)
from accel_ops.weights.lazy_tensors import LazyTensor, create_torch_file, write_lazy_safetensors
from accel_ops.weights.safetensors_io import as_bytes
from accel_plugins.sharding.state import INDEX_NAME, shard_file
from accel_state.errors import CheckpointError, SettingsError
from accel_state.frozen import frozen
from accel_state.remote import AnyPath
from accel_train.checkpoint import layout
from accel_train.checkpoint.files import make_folder, record_of, write_file
from accel_train.checkpoint.layout import MODEL_KEY, OPTIMIZER_KEY, FileRecord


@frozen
class PlannedFile:
    """A file to write.

    Attributes:
        name: Its path in the folder, with `/` between folders.
        write: Writes it at a path, reading each tensor by a function, and returns its record.
        tensors: Its tensors.
    """

    name: str
    write: Callable[[Path, Chunks], FileRecord]
    tensors: Sequence[LazyTensor] = ()


@frozen
class WritePlan:
    """The files of a checkpoint to write, in order, their tensors, and phrases for what is dropped.

    A state of `save_state` has a manifest.
    """

    files: list[PlannedFile]
    tensors: Mapping[Label, LazyTensor]
    dropped: list[str] = field(default_factory=list[str])
    is_state: bool = False


def plan_weights(contents: CheckpointContents, max_shard_size: int, *, safe: bool) -> WritePlan:
    """Plan files of weights, in the layout of transformers."""
    aliases = _aliases(contents.models[:1]) if safe else {}
    weights = {name: lazy for name, lazy in contents.models[0].items() if (0, name) not in aliases}
    filled = list(fill_shards(((name, lazy.nbytes) for name, lazy in weights.items()), max_shard_size))
    plan = numbered(
        [names for names, _ in filled],
        total_size=sum(size for _, size in filled),
        pattern=SAFE_WEIGHTS_PATTERN_NAME if safe else WEIGHTS_PATTERN_NAME,
    )
    make = _safetensors_file if safe else _torch_file
    files = [make(name, {weight: weights[weight] for weight in names}) for name, names in plan.files.items()]
    files += _copies(contents.config_files)
    if plan.index is not None:
        text = json.dumps(plan.index, indent=2, sort_keys=True) + "\n"
        files.append(_text_file(SAFE_WEIGHTS_INDEX_NAME if safe else WEIGHTS_INDEX_NAME, text))
    dropped = [*_beyond(contents, 1, 0, contents.state_files), *aliases.values()]
    tensors = {("model", 0, name): lazy for name, lazy in weights.items()}
    return WritePlan(files=files, tensors=tensors, dropped=dropped)


def plan_full(contents: CheckpointContents, max_shard_size: int) -> WritePlan:
    """Plan a full state, as written by rank 0: one file for each model and optimizer."""
    del max_shard_size
    aliases = _aliases(contents.models)
    files: list[PlannedFile] = []
    for index, model in enumerate(contents.models):
        weights = {name: lazy for name, lazy in model.items() if (index, name) not in aliases}
        files.append(_safetensors_file(layout.safe_weights_name(index), weights))
    for index, optimizer in enumerate(contents.optimizers):
        files.append(_torch_file(layout.optimizer_name(index), optimizer.nested(by_number=True)))
    files += _copies({**contents.state_files, **contents.config_files})
    tensors = {label: lazy for label, lazy in contents.tensors() if label[1:] not in aliases}
    return WritePlan(files=files, tensors=tensors, dropped=[*aliases.values()], is_state=True)


def plan_sharded(contents: CheckpointContents, max_shard_size: int) -> WritePlan:
    """Plan a state with a folder of shards for each model and optimizer, which any number of ranks loads."""
    del max_shard_size
    files: list[PlannedFile] = []
    unnamed: dict[Label, str] = {}
    for index, model in enumerate(contents.models):
        files += _folder(f"{layout.sharded_model_name(index)}/", {MODEL_KEY: model})
    for index, optimizer in enumerate(contents.optimizers):
        if optimizer.unnamed:
            phrase = f"optimizer {index}: {optimizer.unnamed}, and shards are by name"
            unnamed["optimizer", index] = phrase
            continue
        state = {OPTIMIZER_KEY: optimizer.nested(by_number=False)}
        files += _folder(f"{layout.sharded_optimizer_name(index)}/", state)
    files += _copies({**contents.state_files, **contents.config_files})
    tensors = {label: lazy for label, lazy in contents.tensors() if label[:2] not in unnamed}
    return WritePlan(files=files, tensors=tensors, dropped=[*unnamed.values()], is_state=True)


def plan_dcp(contents: CheckpointContents, max_shard_size: int) -> WritePlan:
    """Plan a folder of `torch.distributed.checkpoint` with the keys `model` and `optimizer`."""
    del max_shard_size
    dropped = _beyond(contents, 1, 1, contents.state_files, contents.config_files)
    state: dict[str, Any] = {MODEL_KEY: contents.models[0]}
    written: set[Label] = {("model", 0)}
    for optimizer in contents.optimizers[:1]:
        if optimizer.unnamed:
            dropped.append(f"optimizer 0: {optimizer.unnamed}")
        else:
            state[OPTIMIZER_KEY] = optimizer.nested(by_number=False)
            written.add(("optimizer", 0))
    tensors = {label: lazy for label, lazy in contents.tensors() if label[:2] in written}
    return WritePlan(files=_folder("", state), tensors=tensors, dropped=dropped)


def plan_universal(contents: CheckpointContents, max_shard_size: int) -> WritePlan:
    """Plan a universal checkpoint of DeepSpeed, which engines of ZeRO load on any number of ranks.

    Raises:
        SettingsError: There is no state of Adam whose parameters have names.
    """
    del max_shard_size
    weights, optimizer = _adam_of(contents)
    order = [str(name) for name in optimizer.order()]
    others = {name: lazy for name, lazy in weights.items() if name not in order}
    step = next(iter(optimizer.states.values()))["step"].full()
    model_state = {
        "module": others,
        "buffer_names": [],
        "optimizer": None,
        "param_shapes": [
            OrderedDict((name, torch.Size(weights[name].shape)) for name in group["params"])
            for group in optimizer.groups
        ],
        "frozen_param_shapes": None,
        "frozen_param_fragments": None,
        "shared_params": {},
        "lr_scheduler": None,
        "data_sampler": None,
        "random_ltd": None,
        "sparse_tensor_module_names": [],
        "skipped_steps": 0,
        "global_steps": int(step),
        "global_samples": 0,
        "dp_world_size": 1,
        "mp_world_size": 1,
        "ds_config": {},
        "ds_version": _DEEPSPEED_VERSION,
    }
    # Engines of stage 3 read the second name.
    files = [_torch_file(f"{_TAG}/{name}", model_state) for name in MODEL_FILES]
    parameters = [
        _torch_file(f"{name}/{key}.pt", {"cat_dim": 0, "param": lazy} if lazy.shape else lazy)
        for name in order
        for key, lazy in {"fp32": weights[name], **optimizer.states[name]}.items()
    ]

    def write_parameters(path: Path, chunks: Chunks) -> FileRecord:
        for file in parameters:
            make_folder((path / file.name).parent)
            file.write(path / file.name, chunks)
        groups = recursively_apply(
            lambda lazy: torch.cat([rows for _, rows in chunks(lazy)]).view(lazy.shape),
            [{**group, "params": []} for group in optimizer.groups],
            test_type=is_lazy,
        )
        state = {
            "param_groups": groups,
            "optimizer_state_dict": {"state": {0: {"step": step}}, "param_groups": groups},
            "ds_version": _DEEPSPEED_VERSION,
        }
        return write_file(path / "optimizer_state.pt", lambda sink: torch.save(state, sink), to_disk=True)

    of_parameters = [lazy for file in parameters for lazy in file.tensors]
    files.append(PlannedFile(name=f"{_TAG}/zero", write=write_parameters, tensors=of_parameters))
    files.append(_text_file(UNIVERSAL_TAG_FILE, _TAG))
    adam = CheckpointContents(form="", models=[weights], optimizers=[optimizer])
    dropped = _beyond(contents, 1, 1, contents.state_files, contents.config_files)
    return WritePlan(files=files, tensors=dict(adam.tensors()), dropped=dropped)


_TAG = "universal"
_DEEPSPEED_VERSION = "0.19.0"
"""The version of the format, which engines check."""


def _adam_of(contents: CheckpointContents) -> tuple[dict[str, LazyTensor], OptimizerContents]:
    """Return the weights, trained ones in float32, and Adam's states with counters as tensors."""
    first = contents.optimizers[0] if contents.optimizers else None
    weights = dict(contents.models[0])
    if first is None or first.unnamed:
        why = "it has no optimizer" if first is None else first.unnamed
        raise SettingsError(f"A universal checkpoint has the state of an optimizer by name, and {why}.")
    states: dict[str | int, dict[str, Any]] = {}
    for name in first.order():
        values = first.states.get(name, {})
        if not {"step", "exp_avg", "exp_avg_sq"} <= values.keys() or str(name) not in weights:
            raise SettingsError(f"A universal checkpoint has the state of Adam, and {name!r} has none here.")
        if PurePath(str(name)).name != name:
            raise CheckpointError(f"{name!r} is not a valid parameter name: it would be a path.")
        weights[str(name)] = _in_float32(weights[str(name)])
        states[name] = {
            key: value if isinstance(value, LazyTensor) else lazy_of(torch.tensor(float(value), device="cpu"))
            for key, value in values.items()
        }
    return weights, OptimizerContents(states=states, groups=first.groups)


def _in_float32(lazy: LazyTensor) -> LazyTensor:
    def read(begin: int, end: int) -> Tensor:
        return lazy.read(begin, end).float()

    if lazy.dtype == torch.float32:
        return lazy
    return LazyTensor(shape=lazy.shape, dtype=torch.float32, read=read)


def _beyond(
    contents: CheckpointContents, models: int, optimizers: int, *files: Mapping[str, object]
) -> list[str]:
    """Return phrases for what a format drops: models and optimizers after the first ones, and files."""
    return [
        *(f"model {index}" for index in range(models, len(contents.models))),
        *(f"optimizer {index}" for index in range(optimizers, len(contents.optimizers))),
        *(f"file {name}" for group in files for name in group),
    ]


def _aliases(models: Sequence[Mapping[str, LazyTensor]]) -> dict[Label, str]:
    """Return the further names of tied tensors, by index of the model and name, with a phrase for each."""
    aliases: dict[Label, str] = {}
    for index, weights in enumerate(models):
        first: dict[object, str] = {}
        for name, lazy in weights.items():
            known = (
                None if lazy.identity is None or not lazy.nbytes else first.setdefault(lazy.identity, name)
            )
            if known not in {None, name}:
                aliases[index, name] = f"{name}, the same tensor as {known}"
    return aliases


def _safetensors_file(name: str, weights: Mapping[str, LazyTensor]) -> PlannedFile:
    def write(path: Path, chunks: Chunks) -> FileRecord:
        def write_to(sink: Any) -> None:
            write_lazy_safetensors(weights, sink, lambda _, lazy: chunks(lazy))

        return write_file(path, write_to, to_disk=True)

    return PlannedFile(name=name, write=write, tensors=[*weights.values()])


def _torch_file(name: str, tree: Any) -> PlannedFile:
    """Plan a file of `torch.save`: written first with empty space for the tensors, then filled one by one."""
    tensors = [leaf for _, leaf in leaves(tree) if is_lazy(leaf)]

    def write(path: Path, chunks: Chunks) -> FileRecord:
        made = create_torch_file(path, tree)  # the same tree, with a position for every lazy tensor
        with path.open("r+b") as file:
            for (_, lazy), (_, position) in zip(leaves(tree), leaves(made), strict=True):
                for begin, rows in chunks(lazy) if is_lazy(lazy) else ():
                    if not begin:
                        file.seek(position)
                    file.write(as_bytes(rows))
        return record_of(path, to_disk=True)

    return PlannedFile(name=name, write=write, tensors=tensors)


def _folder(prefix: str, state: Mapping[str, Any]) -> list[PlannedFile]:
    """Plan a DCP folder: a file of shards, then the index, which says where each is in that file."""
    index: list[Metadata] = []

    def write(path: Path, chunks: Chunks) -> FileRecord:
        def write_to(sink: Any) -> None:
            index.append(write_shards(state, sink, path.name, chunks))

        return write_file(path, write_to, to_disk=True)

    def write_index(path: Path, _: Chunks) -> FileRecord:
        return write_file(path, lambda sink: sink.write(pickle.dumps(index.pop())), to_disk=True)

    tensors = [leaf for _, leaf in leaves(state) if is_lazy(leaf)]
    return [
        PlannedFile(name=f"{prefix}{shard_file(0)}", write=write, tensors=tensors),
        PlannedFile(name=f"{prefix}{INDEX_NAME}", write=write_index),
    ]


def _copies(files: Mapping[str, AnyPath]) -> Iterator[PlannedFile]:
    for name, source in files.items():

        def copy(sink: Any, source: Any = source) -> None:
            with source.open("rb") as file:
                shutil.copyfileobj(file, sink, 16 << 20)

        yield PlannedFile(name=name, write=lambda path, _, copy=copy: write_file(path, copy, to_disk=True))


def _text_file(name: str, text: str) -> PlannedFile:
    def write(path: Path, _: Chunks) -> FileRecord:
        return write_file(path, lambda sink: sink.write(text.encode()), to_disk=True)

    return PlannedFile(name=name, write=write)


Writer: TypeAlias = Callable[[CheckpointContents, int], WritePlan]
WRITERS: dict[str, Writer] = {
    "safetensors": partial(plan_weights, safe=True),
    "torch": partial(plan_weights, safe=False),
    "full": plan_full,
    "sharded": plan_sharded,
    "dcp": plan_dcp,
    "universal": plan_universal,
}
"""The formats to write: functions that plan each, from the contents and the bytes per weight file."""
