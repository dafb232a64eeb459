"""Checkpoint files as sources of tensors; checkpoints of the hub; broadcasts from rank 0."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor, distributed, nn

from accel_bigmodel.host_to_device import HostToDevice, upload
from accel_bigmodel.recording import Recording, record_conversion
from accel_ops.weights.hub_names import Conversion, from_hub
from accel_ops.weights.layout import (
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    SAFETENSORS_SUFFIX,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
)
from accel_ops.weights.read import find_checkpoint_files, load_bin
from accel_ops.weights.safetensors_io import SafetensorsFile
from accel_state import runtime
from accel_state.errors import (
    CheckpointError,
    MissingDependencyError,
    SettingsError,
    some_of,
)
from accel_state.files import any_path
from accel_state.platforms import can_replace_mapped
from accel_state.remote import AnyPath, RemotePath
from accel_state.streams import device_streams

_log = logging.getLogger(__name__)
_PATTERNS = (
    (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, f"*{SAFETENSORS_SUFFIX}"),
    (WEIGHTS_NAME, WEIGHTS_INDEX_NAME, "*.bin"),
)
_SUFFIXES = (SAFETENSORS_SUFFIX, ".bin", ".pt", ".pth", ".ckpt", ".json")  # others are those of a hub id


class Source(Protocol):
    """One weight file.

    Attributes:
        tensors: Name to shape and dtype.
        in_place: Whether a tensor may stay in the file and be read when it is used.
        mapped: Whether `get` returns tensors that take no memory until they are used.
        broadcast: Whether reading a tensor is a collective.
        keys: The names in the file of tensors that have another name in the model.
    """

    path: AnyPath
    keys: Mapping[str, str] = MappingProxyType({})
    tensors: dict[str, tuple[tuple[int, ...], torch.dtype]]
    in_place: bool = False
    mapped: bool = False
    broadcast: bool = False

    def get(self, name: str) -> Tensor:
        """Return one tensor, on the CPU."""
        ...

    def part(self, name: str, region: Sequence[slice]) -> Tensor:
        """Return a part of a tensor, on the CPU: a slice of each dim, with a start and a stop."""
        return self.get(name)[tuple(region)]

    def upload(self, dtypes: Mapping[str, torch.dtype], device: torch.device) -> dict[str, Tensor]:
        """Return tensors by name, cast to dtypes on the host and copied to an accelerator."""
        return {name: self.get(name).to(dtype).to(device) for name, dtype in dtypes.items()}

    def check_unchanged(self) -> None:
        """Check that the file was not replaced since it was opened, if reads would not detect that.

        Raises:
            CheckpointError: The file was replaced.
        """


class SafetensorsSource(Source):
    """A safetensors file: mapped, or read in large chunks (Windows) or by ranges (store).

    `pipelines` are those of the load by device, which its files share.
    """

    def __init__(self, path: AnyPath, pipelines: dict[torch.device, HostToDevice] | None = None) -> None:
        self.path = path
        self.in_place = isinstance(path, Path)
        self.file = SafetensorsFile(path)
        self.tensors = {name: (entry.shape, entry.dtype) for name, entry in self.file.entries.items()}
        self.mapped = isinstance(path, Path) and can_replace_mapped()
        self._pipelines = {} if pipelines is None else pipelines

    def get(self, name: str) -> Tensor:
        return self.file.tensor(name) if self.mapped else self.file.read(name)

    def part(self, name: str, region: Sequence[slice]) -> Tensor:
        return self.file.read_part(name, region)

    def upload(self, dtypes: Mapping[str, torch.dtype], device: torch.device) -> dict[str, Tensor]:
        streams = device_streams(device)
        if streams is None:
            return {name: self.file.read(name).to(dtype).to(device) for name, dtype in dtypes.items()}
        if device not in self._pipelines:
            self._pipelines[device] = HostToDevice(streams)
        return upload(self.file, dtypes, self._pipelines[device])

    def check_unchanged(self) -> None:
        self.file.check_unchanged()


class BinSource(Source):
    """A file of `torch.save`; the zip format is mapped until its tensors are loaded, others are read."""

    def __init__(self, path: AnyPath) -> None:
        self.path = path
        state: dict[str, Any] = dict(load_bin(path, mapped=True))
        self._state = {name: value for name, value in state.items() if isinstance(value, Tensor)}
        others = [name for name in state if name not in self._state]
        table = next((name for name in others if _has_tensors(state[name])), None)
        if table is not None and not self._state:
            raise CheckpointError(
                f"{str(path)!r} has its weights under {table!r}: save that entry as a file of its own, best "
                "as safetensors"
            )
        if others:
            _log.warning(
                "Entries of %r that are not tensors were not loaded: %s.", str(path), some_of(others)
            )
        self.tensors = {name: (tuple(value.shape), value.dtype) for name, value in self._state.items()}

    def get(self, name: str) -> Tensor:
        return self._state[name].clone()  # the model's own, since its user may save to this path

    def part(self, name: str, region: Sequence[slice]) -> Tensor:
        return self._state[name][tuple(region)].clone()


def _has_tensors(table: Any) -> bool:
    return isinstance(table, dict) and any(isinstance(value, Tensor) for value in table.values())


def open_checkpoint(checkpoint: str | os.PathLike[str]) -> list[Source]:
    """Open every weight file of a checkpoint.

    Raises:
        CheckpointError: A file is damaged, unsafe or absent.
        FileNotFoundError: The path does not exist, and it is not the id of a model.
    """
    files = find_checkpoint_files(local_checkpoint(checkpoint))
    pipelines: dict[torch.device, HostToDevice] = {}
    sources = {
        path: SafetensorsSource(path, pipelines) if path.suffix == SAFETENSORS_SUFFIX else BinSource(path)
        for path in files.files
    }
    # A tensor that several files have comes from the one that the index names.
    for name, path in (files.weight_map or {}).items():
        if name in sources[path].tensors:
            for source in sources.values():
                if source is not sources[path]:
                    source.tensors.pop(name, None)
    return [*sources.values()]


def with_model_names(
    model: nn.Module, sources: Sequence[Source], wanted: Mapping[str, Tensor]
) -> list[Source]:
    """Return the sources of a model's tensors, by the conversion that transformers has for their files.

    Raises:
        CheckpointMismatchError: Tensors that belong together do not fit.
    """
    source_of = {key: source for source in sources for key in source.tensors}
    renamed, conversions = from_hub(model, source_of, wanted)
    converted = {key for conversion in conversions for key in conversion.parts}
    of_conversions = [ConvertedSource(conversions, source_of)] if conversions else []
    for source in sources:
        source.keys = {renamed[key]: key for key in source.tensors if key in renamed}
        source.tensors = {
            renamed.get(key, key): entry for key, entry in source.tensors.items() if key not in converted
        }
    return [*sources, *of_conversions]


class ConvertedSource(Source):
    """Tensors that the model's own conversion makes of those in the files, one conversion at a time."""

    def __init__(self, conversions: Sequence[Conversion], source_of: Mapping[str, Source]) -> None:
        self._sources = {key: source_of[key] for conversion in conversions for key in conversion.parts}
        first = next(iter(self._sources.values()))
        self.path, self.broadcast = first.path, first.broadcast
        self.tensors = {}
        self._conversion_of: dict[str, Conversion] = {}
        self._recorded: dict[str, tuple[Recording, Tensor]] = {}
        self._ready: dict[str, Tensor] = {}
        for conversion in conversions:
            parts = {
                key: (*self._sources[key].tensors[key], partial(self._sources[key].part, key))
                for key in conversion.parts
            }
            recording, results = record_conversion(conversion, parts)
            self.tensors |= {name: (tuple(value.shape), value.dtype) for name, value in results.items()}
            self._conversion_of |= dict.fromkeys(results, conversion)
            if recording.is_complete:
                self._recorded |= {name: (recording, value) for name, value in results.items()}

    def get(self, name: str) -> Tensor:
        if name not in self._ready:
            self._ready |= self._conversion_of[name].run(lambda key: self._sources[key].get(key))
        return self._ready.pop(name)

    def part(self, name: str, region: Sequence[slice]) -> Tensor:
        if name not in self._recorded or self.broadcast:
            return super().part(name, region)
        recording, value = self._recorded[name]
        return recording.read(value, region)

    def check_unchanged(self) -> None:
        for source in dict.fromkeys(self._sources.values()):
            source.check_unchanged()


def local_checkpoint(checkpoint: str | os.PathLike[str]) -> AnyPath:
    """Find a checkpoint on this machine, or download it from the hub.

    Args:
        checkpoint: A path, or an fsspec URL, which is returned; or the id of a model on the hub, whose local
            cache is searched first.

    Raises:
        FileNotFoundError: The path or model does not exist.
        MissingDependencyError: It may be a hub id, and `huggingface_hub` is not installed.
    """
    path = any_path(checkpoint, "checkpoint")
    if isinstance(path, RemotePath):
        return path
    name = os.fspath(checkpoint)
    if path.exists() or name.startswith((".", "/", "~")) or name.count("/") > 1 or path.suffix in _SUFFIXES:
        return path
    try:
        hub, errors = import_module("huggingface_hub"), import_module("huggingface_hub.errors")
    except ImportError as error:
        raise MissingDependencyError(
            f"no checkpoint at {name!r}; if it is a model on the hub, install accel-bigmodel[hub]"
        ) from error
    try:
        folder = Path(hub.snapshot_download(name, local_files_only=True, allow_patterns=["*"]))
        find_checkpoint_files(folder)  # all of them, or the rest is downloaded
        return folder
    except (errors.LocalEntryNotFoundError, FileNotFoundError, errors.HFValidationError, CheckpointError):
        pass
    try:
        for patterns in _PATTERNS:
            folder = Path(hub.snapshot_download(name, allow_patterns=list(patterns)))
            if any(folder.glob(patterns[2])):
                return folder
    except (OSError, ValueError) as error:
        raise FileNotFoundError(
            f"no checkpoint at {name!r}: not a local path or a model in the hub's cache, and the hub "
            "did not provide it ("
            f"{str(error).splitlines()[0]})"
        ) from error
    raise FileNotFoundError(f"the model {name!r} on the hub has no weights")


def broadcast_sources(checkpoint: str | os.PathLike[str]) -> list[Source]:
    """Open a checkpoint on rank 0, and create its sources on every rank.

    All ranks must then read the same tensors in the same order; each tensor is broadcast once.

    Raises:
        SettingsError: There is no process group.
        CheckpointError: Rank 0 could not open it; all ranks raise.
    """
    if not (distributed.is_available() and distributed.is_initialized()):
        raise SettingsError(
            "broadcast_from_rank0=True needs a process group: start with `accel launch` or torchrun"
        )
    opened: list[Source] = []
    lines: list[Any] = [None]
    if distributed.get_rank() == 0:
        try:
            opened = open_checkpoint(checkpoint)
            lines = [[(str(source.path), source.tensors) for source in opened]]
        except (ImportError, OSError, ValueError) as error:
            lines = [error]
    distributed.broadcast_object_list(lines, src=0)
    if isinstance(lines[0], Exception):
        raise lines[0]
    reading = opened or [None] * len(lines[0])
    return [
        BroadcastSource(any_path(path, "checkpoint"), tensors, source)
        for (path, tensors), source in zip(lines[0], reading, strict=True)
    ]


class BroadcastSource(Source):
    """One file that rank 0 reads and broadcasts. Reading a tensor is a collective."""

    broadcast = True

    def __init__(
        self,
        path: AnyPath,
        tensors: dict[str, tuple[tuple[int, ...], torch.dtype]],
        source: Source | None,
    ) -> None:
        self.path = path
        self.tensors = self._stored = tensors
        self._source = source

    def get(self, name: str) -> Tensor:
        # The tensor is on the device of the collectives, on every rank.
        on_host = distributed.get_backend() in ("gloo", "mpi")
        device = torch.device("cpu") if on_host else runtime.active.device
        shape, dtype = self._stored[name]
        if self._source is not None:
            tensor = self._source.get(name).to(device).contiguous()
        else:
            tensor = torch.empty(shape, dtype=dtype, device=device)
        # As bytes: not every backend supports every dtype.
        distributed.broadcast(tensor.view(-1).view(torch.uint8), src=0)
        return tensor
