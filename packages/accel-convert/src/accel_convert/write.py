"""Write a checkpoint in any format: `WRITERS` plan its files, and a `VerifyingReader` reads its tensors."""

from __future__ import annotations

import json
import shutil
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import field
from functools import partial
from pathlib import Path, PurePath
from typing import Any

import torch
import xxhash
from torch import Tensor

from accel_convert.contents import CheckpointContents, Label, OptimizerContents, leaves
from accel_convert.deepspeed import MODEL_FILES, UNIVERSAL_TAG_FILE
from accel_convert.stream import FolderWriter
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
from accel_state.files import trim_heap
from accel_state.frozen import frozen
from accel_train.checkpoint import layout
from accel_train.checkpoint.contents import MODEL_KEY, OPTIMIZER_KEY
from accel_train.checkpoint.files import make_folder, record_of, write_file
from accel_train.checkpoint.layout import FileRecord


class VerifyingReader:
    """Reads tensors in chunks, and records their digests.

    Args:
        limit: Bytes of memory that a conversion may take.

    Attributes:
        digests: XXH3 hash of the elements, shape and dtype of each tensor, by label.
    """

    def __init__(self, limit: int) -> None:
        self._chunk_size = limit // _PARTS
        self._since_trimmed = 0
        self.digests: dict[Label, tuple[str, tuple[int, ...], torch.dtype]] = {}

    def chunks(self, label: Label, lazy: LazyTensor) -> Iterator[tuple[int, Tensor]]:
        """Yield the chunks of a tensor, as `LazyTensor.chunks` does."""
        digest = xxhash.xxh3_64()
        for begin, rows in lazy.chunks(self._chunk_size):
            digest.update(as_bytes(rows))
            yield begin, rows
        self.digests[label] = (digest.hexdigest(), lazy.shape, lazy.dtype)
        self._since_trimmed += lazy.nbytes
        if self._since_trimmed > self._chunk_size:
            self._since_trimmed = 0
            trim_heap()

    def read(self, label: Label, lazy: LazyTensor) -> None:
        """Read a tensor only for its digest."""
        for _ in self.chunks(label, lazy):
            pass


_PARTS = 4
"""A chunk is in memory up to this many times: as read, as part of a merge, as serialised, and in a buffer."""


@frozen
class PlannedFile:
    """A file to write.

    Attributes:
        name: Its path in the folder, with `/` between folders.
        nbytes: Bytes of its tensors.
        count: Number of its tensors.
        write: Writes it at a path, and returns its record.
    """

    name: str
    nbytes: int = 0
    count: int = 0
    write: Callable[[Path, VerifyingReader], FileRecord]


@frozen
class WritePlan:
    """The files of a checkpoint to write, in order, and phrases for items that are dropped.

    Attributes:
        labels: The labels of the tensors to write.
        is_state: Whether it is a state of `save_state`, which has a manifest.
    """

    files: list[PlannedFile]
    labels: set[Label]
    dropped: list[str] = field(default_factory=list[str])
    is_state: bool = False


def plan_weights(contents: CheckpointContents, max_shard_size: int, *, safe: bool) -> WritePlan:
    """Plan files of weights, in the layout of transformers."""
    dropped = _besides_weights(contents)
    weights, aliases = _without_aliases(contents.models[0]) if safe else (dict(contents.models[0]), [])
    dropped += [f"{name}, the same tensor as {first}" for name, first in aliases]
    filled = list(fill_shards(((name, lazy.nbytes) for name, lazy in weights.items()), max_shard_size))
    plan = numbered(
        [names for names, _ in filled],
        total_size=sum(size for _, size in filled),
        pattern=SAFE_WEIGHTS_PATTERN_NAME if safe else WEIGHTS_PATTERN_NAME,
    )
    files: list[PlannedFile] = []
    for name, names in plan.files.items():
        tree = {weight: weights[weight] for weight in names}
        labels: dict[Label, LazyTensor] = {("model", 0, weight): lazy for weight, lazy in tree.items()}
        files.append(_safetensors_file(name, tree, 0) if safe else _torch_file(name, tree, labels))
    files += [_copied(name, path) for name, path in contents.config_files.items()]
    if plan.index is not None:
        text = json.dumps(plan.index, indent=2, sort_keys=True) + "\n"
        files.append(_text_file(SAFE_WEIGHTS_INDEX_NAME if safe else WEIGHTS_INDEX_NAME, text))
    return WritePlan(files=files, labels={("model", 0, name) for name in weights}, dropped=dropped)


def plan_full(contents: CheckpointContents, max_shard_size: int) -> WritePlan:
    """Plan a full state, as written by rank 0: one file for each model and optimizer."""
    del max_shard_size
    files: list[PlannedFile] = []
    labels: set[Label] = set()
    dropped: list[str] = []
    for index, model in enumerate(contents.models):
        weights, aliases = _without_aliases(model)
        dropped += [f"{name}, the same tensor as {first}" for name, first in aliases]
        files.append(_safetensors_file(layout.safe_weights_name(index), weights, index))
        labels |= {("model", index, name) for name in weights}
    for index, optimizer in enumerate(contents.optimizers):
        part: dict[Label, LazyTensor] = {
            ("optimizer", index, *path): lazy for path, lazy in optimizer.tensors()
        }
        labels |= part.keys()
        files.append(_torch_file(layout.optimizer_name(index), optimizer.nested(by_number=True), part))
    files += _other_files(contents)
    return WritePlan(files=files, labels=labels, dropped=dropped, is_state=True)


def plan_sharded(contents: CheckpointContents, max_shard_size: int) -> WritePlan:
    """Plan a state with a folder of shards for each model and optimizer, which any number of ranks loads."""
    del max_shard_size
    files: list[PlannedFile] = []
    labels: set[Label] = set()
    dropped: list[str] = []
    for index, model in enumerate(contents.models):
        of_model: dict[tuple[str | int, ...], Label] = {
            (MODEL_KEY, name): ("model", index, name) for name in model
        }
        labels |= {*of_model.values()}
        files += _folder(layout.sharded_model_name(index), {MODEL_KEY: model}, of_model)
    for index, optimizer in enumerate(contents.optimizers):
        if optimizer.unnamed:
            dropped.append(f"optimizer {index}: {optimizer.unnamed}, and shards are by name")
            continue
        state, of_state = _named(optimizer, index)
        labels |= {*of_state.values()}
        files += _folder(layout.sharded_optimizer_name(index), state, of_state)
    files += _other_files(contents)
    return WritePlan(files=files, labels=labels, dropped=dropped, is_state=True)


def plan_dcp(contents: CheckpointContents, max_shard_size: int) -> WritePlan:
    """Plan a folder of `torch.distributed.checkpoint` with the keys `model` and `optimizer`."""
    del max_shard_size
    dropped = _besides_weights(contents, optimizers=False)
    state: dict[str, Any] = {MODEL_KEY: contents.models[0]}
    labels: dict[tuple[str | int, ...], Label] = {
        (MODEL_KEY, name): ("model", 0, name) for name in contents.models[0]
    }
    for index, optimizer in enumerate(contents.optimizers):
        if index or optimizer.unnamed:
            dropped.append(f"optimizer {index}: {optimizer.unnamed or 'there is one in such a folder'}")
            continue
        named, of_state = _named(optimizer, index)
        state |= named
        labels |= of_state
    dropped += [f"file {name}" for name in contents.config_files]
    return WritePlan(files=_folder("", state, labels), labels={*labels.values()}, dropped=dropped)


def plan_universal(contents: CheckpointContents, max_shard_size: int) -> WritePlan:
    """Plan a universal checkpoint of DeepSpeed, which engines of ZeRO load on any number of ranks.

    Raises:
        SettingsError: There is no state of Adam whose parameters have names.
    """
    del max_shard_size
    weights, optimizer = _adam_of(contents)
    dropped = [f"model {index}" for index in range(1, len(contents.models))]
    dropped += [f"optimizer {index}" for index in range(1, len(contents.optimizers))]
    dropped += [f"file {name}" for name in (*contents.state_files, *contents.config_files)]
    order = [str(name) for name in optimizer.order()]
    numbers = {name: number for number, name in enumerate(order)}
    others = {name: lazy for name, lazy in weights.items() if name not in numbers}
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
    labels: dict[Label, LazyTensor] = {("model", 0, name): lazy for name, lazy in others.items()}
    # Engines of stage 3 read the second name.
    files = [_torch_file(f"{_TAG}/{name}", model_state, dict(labels)) for name in MODEL_FILES]
    trees: dict[str, tuple[Any, Label, LazyTensor]] = {}
    for name in order:
        label: Label = ("model", 0, name)
        trees[f"{name}/fp32"] = {"cat_dim": 0, "param": weights[name]}, label, weights[name]
        for key, lazy in optimizer.states[name].items():
            tree = {"cat_dim": 0, "param": lazy} if lazy.shape else lazy
            trees[f"{name}/{key}"] = tree, ("optimizer", 0, "state", numbers[name], key), lazy
    labels |= {label: lazy for _, label, lazy in trees.values()}
    of_groups: dict[Label, LazyTensor] = {
        ("optimizer", 0, *path): lazy for path, lazy in optimizer.tensors() if path[0] == "param_groups"
    }
    labels |= of_groups

    def write_parameters(path: Path, stream: VerifyingReader) -> FileRecord:
        for name, (tree, label, lazy) in trees.items():
            make_folder((path / name).parent)
            _torch_file("", tree, {label: lazy}).write(path / f"{name}.pt", stream)
        for label, lazy in of_groups.items():
            stream.read(label, lazy)
        groups = recursively_apply(
            LazyTensor.full,
            [{**group, "params": []} for group in optimizer.groups],
            test_type=lambda leaf: isinstance(leaf, LazyTensor),
        )
        state = {
            "param_groups": groups,
            "optimizer_state_dict": {"state": {0: {"step": step}}, "param_groups": groups},
            "ds_version": _DEEPSPEED_VERSION,
        }
        return write_file(path / "optimizer_state.pt", lambda sink: torch.save(state, sink), to_disk=True)

    nbytes = sum(lazy.nbytes for _, _, lazy in trees.values())
    files.append(PlannedFile(name=f"{_TAG}/zero", nbytes=nbytes, count=len(trees), write=write_parameters))
    files.append(_text_file(UNIVERSAL_TAG_FILE, _TAG))
    return WritePlan(files=files, labels={*labels}, dropped=dropped)


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
        weights[str(name)] = _converted(weights[str(name)], torch.float32)
        states[name] = {
            key: value if isinstance(value, LazyTensor) else _lazy_scalar(value)
            for key, value in values.items()
        }
    return weights, OptimizerContents(states=states, groups=first.groups)


def _converted(lazy: LazyTensor, dtype: torch.dtype) -> LazyTensor:
    if lazy.dtype == dtype:
        return lazy
    return LazyTensor(shape=lazy.shape, dtype=dtype, read=lambda begin, end: lazy.read(begin, end).to(dtype))


def _lazy_scalar(value: float | Tensor) -> LazyTensor:
    tensor = torch.tensor([float(value)], device="cpu")
    return LazyTensor(shape=(), dtype=tensor.dtype, read=lambda begin, end: tensor[begin:end].clone())


def _named(
    optimizer: OptimizerContents, index: int
) -> tuple[dict[str, Any], dict[tuple[str | int, ...], Label]]:
    """Return the nested state of an optimizer by name, and the labels of its tensors by path."""
    named = optimizer.nested(by_number=False)
    labels: dict[tuple[str | int, ...], Label] = {
        (OPTIMIZER_KEY, *path): ("optimizer", index, *numbered_path)
        for (path, leaf), (numbered_path, _) in zip(
            leaves(named), leaves(optimizer.nested(by_number=True)), strict=True
        )
        if isinstance(leaf, LazyTensor)
    }
    return {OPTIMIZER_KEY: named}, labels


def _besides_weights(contents: CheckpointContents, *, optimizers: bool = True) -> list[str]:
    """Return phrases for items that a format of one model's weights drops."""
    dropped = [f"model {index}" for index in range(1, len(contents.models))]
    dropped += [f"optimizer {index}" for index in range(len(contents.optimizers)) if optimizers]
    return [*dropped, *(f"file {name}" for name in contents.state_files)]


def _other_files(contents: CheckpointContents) -> list[PlannedFile]:
    others = (*contents.state_files.items(), *contents.config_files.items())
    return [_copied(name, path) for name, path in others]


def _without_aliases(
    weights: Mapping[str, LazyTensor],
) -> tuple[dict[str, LazyTensor], list[tuple[str, str]]]:
    """Return the weights without further names of tied tensors, and these names with the first name."""
    first: dict[object, str] = {}
    distinct: dict[str, LazyTensor] = {}
    aliases: list[tuple[str, str]] = []
    for name, lazy in weights.items():
        if lazy.identity is not None and lazy.nbytes and lazy.identity in first:
            aliases.append((name, first[lazy.identity]))
            continue
        first[lazy.identity] = name
        distinct[name] = lazy
    return distinct, aliases


def _safetensors_file(name: str, weights: Mapping[str, LazyTensor], index: int) -> PlannedFile:
    def write(path: Path, stream: VerifyingReader) -> FileRecord:
        def chunks(weight: str, lazy: LazyTensor) -> Iterator[tuple[int, Tensor]]:
            return stream.chunks(("model", index, weight), lazy)

        return write_file(path, lambda sink: write_lazy_safetensors(weights, sink, chunks), to_disk=True)

    return PlannedFile(name=name, nbytes=_nbytes(weights), count=len(weights), write=write)


def _torch_file(name: str, tree: dict[str, Any], labels: Mapping[Label, LazyTensor]) -> PlannedFile:
    """Plan a file of `torch.save`: written first with empty space for the tensors, then filled one by one."""

    def write(path: Path, stream: VerifyingReader) -> FileRecord:
        made = create_torch_file(path, tree)  # the same tree, with a position for every lazy tensor
        positions = {id(leaf): at for (_, leaf), (_, at) in zip(leaves(tree), leaves(made), strict=True)}
        with path.open("r+b") as file:
            for label, lazy in labels.items():
                file.seek(positions[id(lazy)])
                for _, rows in stream.chunks(label, lazy):
                    file.write(as_bytes(rows))
        return record_of(path, to_disk=True)

    return PlannedFile(name=name, nbytes=_nbytes(labels), count=len(labels), write=write)


def _folder(
    folder: str, state: Mapping[str, Any], labels: Mapping[tuple[str | int, ...], Label]
) -> list[PlannedFile]:
    """Plan a DCP folder: a file of shards, then the index."""
    writer = FolderWriter(state)
    prefix = f"{folder}/" if folder else ""

    def write_shards(path: Path, stream: VerifyingReader) -> FileRecord:
        def chunks(where: tuple[str | int, ...], lazy: LazyTensor) -> Iterator[tuple[int, Tensor]]:
            return stream.chunks(labels[where], lazy)

        return write_file(path, lambda sink: writer.write(sink, path.name, chunks), to_disk=True)

    def write_index(path: Path, _: VerifyingReader) -> FileRecord:
        return write_file(path, writer.write_index, to_disk=True)

    nbytes, count = _nbytes(writer.tensors), len(writer.tensors)
    return [
        PlannedFile(name=f"{prefix}{shard_file(0)}", nbytes=nbytes, count=count, write=write_shards),
        PlannedFile(name=f"{prefix}{INDEX_NAME}", write=write_index),
    ]


def _nbytes(tensors: Mapping[Any, LazyTensor]) -> int:
    return sum(lazy.nbytes for lazy in tensors.values())


def _copied(name: str, source: Any) -> PlannedFile:
    def copy(sink: Any) -> None:
        with source.open("rb") as file:
            shutil.copyfileobj(file, sink, 16 << 20)

    return PlannedFile(name=name, write=lambda path, _: write_file(path, copy, to_disk=True))


def _text_file(name: str, text: str) -> PlannedFile:
    def write(path: Path, _: VerifyingReader) -> FileRecord:
        return write_file(path, lambda sink: sink.write(text.encode()), to_disk=True)

    return PlannedFile(name=name, write=write)


WRITERS: dict[str, Callable[[CheckpointContents, int], WritePlan]] = {
    "safetensors": partial(plan_weights, safe=True),
    "torch": partial(plan_weights, safe=False),
    "full": plan_full,
    "sharded": plan_sharded,
    "dcp": plan_dcp,
    "universal": plan_universal,
}
"""The formats to write: functions that plan each, from the contents and the bytes per weight file."""
