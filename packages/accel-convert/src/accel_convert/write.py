"""Write a checkpoint in each format: `WRITERS`."""

from __future__ import annotations

import json
import pickle
import shutil
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
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
from accel_state.remote import AnyPath
from accel_train.checkpoint import layout
from accel_train.checkpoint.files import make_folder, record_of, write_file
from accel_train.checkpoint.layout import MODEL_KEY, OPTIMIZER_KEY, FileRecord, Manifest


class Output:
    """The files of a checkpoint to write, in order.

    Args:
        folder: Receives them; if `None`, nothing is written.
        chunks: Reads each tensor.

    Attributes:
        files: The number and bytes of the tensors in each file, by its name with `/` between folders.
        records: The size and checksum of each file.
        dropped: A phrase for each item that the format lacks.
        tensors: The tensors in all files; set by the writer of a format.
    """

    def __init__(self, folder: Path | None, chunks: Chunks) -> None:
        self._folder, self.chunks = folder, chunks
        self.files: dict[str, tuple[int, int]] = {}
        self.records: dict[str, FileRecord] = {}
        self.dropped: list[str] = []
        self.tensors: Mapping[Label, LazyTensor] = {}

    def add(self, name: str, content: Any, write: Callable[[Path], FileRecord]) -> None:
        """Add a file with the lazy tensors in nested containers, and write it by a function."""
        sizes = [leaf.nbytes for _, leaf in leaves(content) if is_lazy(leaf)]
        self.files[name] = len(sizes), sum(sizes)
        if self._folder is not None:
            make_folder((self._folder / name).parent)
            self.records[name] = write(self._folder / name)

    def add_file(self, name: str, write: Callable[[Any], object], content: Any = ()) -> None:
        """Add a file that a function writes to a sink."""
        self.add(name, content, lambda path: write_file(path, write, to_disk=True))

    def add_safetensors(self, name: str, weights: Mapping[str, LazyTensor]) -> None:
        """Add a file of safetensors."""

        def write(sink: Any) -> None:
            write_lazy_safetensors(weights, sink, lambda _, lazy: self.chunks(lazy))

        self.add_file(name, write, weights)

    def add_torch(self, name: str, tree: Any) -> None:
        """Add a file of `torch.save`."""
        self.add(name, tree, lambda path: write_torch_file(path, tree, self.chunks))

    def add_shards(self, prefix: str, state: Mapping[str, Any]) -> None:
        """Add a DCP folder: a file of shards, then the index, which says where each is in that file."""
        index: list[Metadata] = []
        file = shard_file(0)

        def write(sink: Any) -> None:
            index.append(write_shards(state, sink, file, self.chunks))

        self.add_file(f"{prefix}{file}", write, state)
        self.add_file(f"{prefix}{INDEX_NAME}", lambda sink: sink.write(pickle.dumps(index.pop())))

    def add_copies(self, files: Mapping[str, AnyPath]) -> None:
        """Add copies of files."""
        for name, source in files.items():

            def copy(sink: Any, source: Any = source) -> None:
                with source.open("rb") as file:
                    shutil.copyfileobj(file, sink, 16 << 20)

            self.add_file(name, copy)

    def drop(
        self, contents: CheckpointContents, models: int, optimizers: int, *files: Mapping[str, object]
    ) -> None:
        """Drop models and optimizers after the first ones, and files."""
        self.dropped += (f"model {index}" for index in range(models, len(contents.models)))
        self.dropped += (f"optimizer {index}" for index in range(optimizers, len(contents.optimizers)))
        self.dropped += (f"file {name}" for group in files for name in group)


def write_torch_file(path: Path, tree: Any, chunks: Chunks) -> FileRecord:
    """Write a file of `torch.save`: first with empty space for the tensors, then fill it one by one."""
    made = create_torch_file(path, tree)  # the same tree, with a position for every lazy tensor
    with path.open("r+b") as file:
        for (_, lazy), (_, position) in zip(leaves(tree), leaves(made), strict=True):
            for begin, rows in chunks(lazy) if is_lazy(lazy) else ():
                if not begin:
                    file.seek(position)
                file.write(as_bytes(rows))
    return record_of(path, to_disk=True)


def write_weights(contents: CheckpointContents, out: Output, max_shard_size: int, *, safe: bool) -> None:
    """Write files of weights, in the layout of transformers."""
    out.drop(contents, 1, 0, contents.state_files)
    aliases = _aliases(contents.models[:1]) if safe else {}
    out.dropped += aliases.values()
    weights = {name: lazy for name, lazy in contents.models[0].items() if (0, name) not in aliases}
    filled = list(fill_shards(((name, lazy.nbytes) for name, lazy in weights.items()), max_shard_size))
    plan = numbered(
        [names for names, _ in filled],
        total_size=sum(size for _, size in filled),
        pattern=SAFE_WEIGHTS_PATTERN_NAME if safe else WEIGHTS_PATTERN_NAME,
    )
    add = out.add_safetensors if safe else out.add_torch
    for name, names in plan.files.items():
        # safetensors, too, sorts the tensors of a file by name.
        add(name, {weight: weights[weight] for weight in (sorted(names) if safe else names)})
    out.add_copies(contents.config_files)
    if plan.index is not None:
        text = json.dumps(plan.index, indent=2, sort_keys=True) + "\n"
        name = SAFE_WEIGHTS_INDEX_NAME if safe else WEIGHTS_INDEX_NAME
        out.add_file(name, lambda sink: sink.write(text.encode()))
    out.tensors = {("model", 0, name): lazy for name, lazy in weights.items()}


def write_full(contents: CheckpointContents, out: Output, _: int) -> None:
    """Write a full state, as rank 0 does: one file for each model and optimizer."""
    aliases = _aliases(contents.models)
    out.dropped += aliases.values()
    for index, model in enumerate(contents.models):
        weights = {name: lazy for name, lazy in model.items() if (index, name) not in aliases}
        out.add_safetensors(layout.safe_weights_name(index), weights)
    for index, optimizer in enumerate(contents.optimizers):
        out.add_torch(layout.optimizer_name(index), optimizer.nested(by_number=True))
    _add_state_files(contents, out)
    out.tensors = {label: lazy for label, lazy in contents.tensors() if label[1:] not in aliases}


def write_sharded(contents: CheckpointContents, out: Output, _: int) -> None:
    """Write a state with a folder of shards for each model and optimizer, which any number of ranks loads."""
    unnamed: set[Label] = set()
    for index, model in enumerate(contents.models):
        out.add_shards(f"{layout.sharded_model_name(index)}/", {MODEL_KEY: model})
    for index, optimizer in enumerate(contents.optimizers):
        if optimizer.unnamed:
            out.dropped.append(f"optimizer {index}: {optimizer.unnamed}, and shards are by name")
            unnamed.add(("optimizer", index))
            continue
        state = {OPTIMIZER_KEY: optimizer.nested(by_number=False)}
        out.add_shards(f"{layout.sharded_optimizer_name(index)}/", state)
    _add_state_files(contents, out)
    out.tensors = {label: lazy for label, lazy in contents.tensors() if label[:2] not in unnamed}


def _add_state_files(contents: CheckpointContents, out: Output) -> None:
    """Add the other files of a state, and its manifest, which comes last."""
    out.add_copies({**contents.state_files, **contents.config_files})
    old, records = contents.manifest or Manifest(world_size=1, step=0), dict(out.records)
    manifest = replace(old, files=records)
    out.add_file(layout.MANIFEST_NAME, lambda sink: sink.write(manifest.to_text().encode()))


def write_dcp(contents: CheckpointContents, out: Output, _: int) -> None:
    """Write a folder of `torch.distributed.checkpoint` with the keys `model` and `optimizer`."""
    out.drop(contents, 1, 1, contents.state_files, contents.config_files)
    state: dict[str, Any] = {MODEL_KEY: contents.models[0]}
    written: set[Label] = {("model", 0)}
    for optimizer in contents.optimizers[:1]:
        if optimizer.unnamed:
            out.dropped.append(f"optimizer 0: {optimizer.unnamed}")
        else:
            state[OPTIMIZER_KEY] = optimizer.nested(by_number=False)
            written.add(("optimizer", 0))
    out.add_shards("", state)
    out.tensors = {label: lazy for label, lazy in contents.tensors() if label[:2] in written}


def write_universal(contents: CheckpointContents, out: Output, _: int) -> None:
    """Write a universal checkpoint of DeepSpeed, which engines of ZeRO load on any number of ranks.

    Raises:
        SettingsError: There is no state of Adam whose parameters have names.
    """
    out.drop(contents, 1, 1, contents.state_files, contents.config_files)
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
    for name in MODEL_FILES:  # engines of stage 3 read the second
        out.add_torch(f"{_TAG}/{name}", model_state)
    parameters = {
        f"{name}/{key}.pt": {"cat_dim": 0, "param": lazy} if lazy.shape else lazy
        for name in order
        for key, lazy in {"fp32": weights[name], **optimizer.states[name]}.items()
    }

    def write_parameters(path: Path) -> FileRecord:
        for name, tree in parameters.items():
            make_folder((path / name).parent)
            write_torch_file(path / name, tree, out.chunks)
        groups = recursively_apply(
            lambda lazy: torch.cat([rows for _, rows in out.chunks(lazy)]).view(lazy.shape),
            [{**group, "params": []} for group in optimizer.groups],
            test_type=is_lazy,
        )
        state = {
            "param_groups": groups,
            "optimizer_state_dict": {"state": {0: {"step": step}}, "param_groups": groups},
            "ds_version": _DEEPSPEED_VERSION,
        }
        return write_file(path / "optimizer_state.pt", lambda sink: torch.save(state, sink), to_disk=True)

    out.add(f"{_TAG}/zero", parameters, write_parameters)
    out.add_file(UNIVERSAL_TAG_FILE, lambda sink: sink.write(_TAG.encode()))
    adam = CheckpointContents(form="", models=[weights], optimizers=[optimizer])
    out.tensors = dict(adam.tensors())


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


Writer: TypeAlias = Callable[[CheckpointContents, Output, int], None]
WRITERS: dict[str, Writer] = {
    "safetensors": partial(write_weights, safe=True),
    "torch": partial(write_weights, safe=False),
    "full": write_full,
    "sharded": write_sharded,
    "dcp": write_dcp,
    "universal": write_universal,
}
"""The formats to write: functions of the contents, their output, and the bytes per weight file."""
