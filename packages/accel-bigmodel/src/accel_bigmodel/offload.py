"""Tensors offloaded to the disk: a folder's index, `StoredTensor`, `OffloadedWeightsLoader`."""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from accel_bigmodel.placement import model_tensors, set_module_tensor_to_device, torch_dtype
from accel_ops.weights.layout import OFFLOAD_INDEX_NAME
from accel_ops.weights.read import entry_of
from accel_ops.weights.safetensors_io import SafetensorsFile, as_bytes
from accel_ops.weights.tensors import tensor_memory
from accel_state.errors import CheckpointError, CheckpointWriteError, SettingsError, some_of
from accel_state.files import read_json
from accel_state.frozen import frozen

if TYPE_CHECKING:
    Device = int | str | torch.device
    Index = dict[str, dict[str, Any]]


def save_offload_index(index: Index, offload_folder: str | os.PathLike[str]) -> None:
    """Add entries to a folder's `index.json`.

    Raises:
        CheckpointWriteError: It cannot be written, such as on a full disk; an old index stays unchanged.
    """
    if not index:
        return
    path = Path(offload_folder) / OFFLOAD_INDEX_NAME
    known = read_offload_index(offload_folder) if path.is_file() else {}
    text = json.dumps({**known, **index}, indent=2) + "\n"
    _write(path, text.encode(), "the index of offloaded weights")


def _write(path: Path, content: Any, what: str) -> None:
    """Replace a file atomically: a model may have the old file mapped, or another process may read it."""
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        # Plain writes: a write through a mapping would end the process with SIGBUS on a full disk.
        with temporary.open("wb") as file:
            file.write(content)
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):  # such as of a name that is too long
            temporary.unlink(missing_ok=True)
        raise CheckpointWriteError(f"could not write {what} to {str(path)!r}: {error.strerror}") from error


def read_offload_index(offload_folder: str | os.PathLike[str]) -> Index:
    """Read a folder's `index.json`.

    Raises:
        CheckpointError: The file is not an index.
        FileNotFoundError: There is no index.
    """
    path = Path(offload_folder) / OFFLOAD_INDEX_NAME
    index = read_json(path, what="index of offloaded weights")
    if not isinstance(index, dict):
        raise CheckpointError(
            f"{str(path)!r} is not a valid index of offloaded weights: it has no table of names"
        )
    return index


@frozen
class StoredTensor:
    """An offloaded tensor between its uses.

    Attributes:
        memory: The tensor as it is stored, in memory or mapped from a file.
        dtype: The dtype in which it is used.
        file: The safetensors file that it is mapped from, if any: large reads are faster than a mapping.
        name: Its name in that file.
    """

    memory: Tensor
    dtype: torch.dtype
    file: SafetensorsFile | None = None
    name: str = ""

    @property
    def is_cast(self) -> bool:
        """Whether it is stored in another dtype than it is used in."""
        return self.memory.dtype != self.dtype

    @property
    def nbytes(self) -> int:
        """Its size in bytes in the dtype in which it is used."""
        return self.memory.numel() * self.dtype.itemsize

    @property
    def key(self) -> tuple[object, ...]:
        """A key that is equal for tied weights: the same bytes, used in the same dtype."""
        memory = self.memory
        if not memory.numel():
            return (id(memory),)
        return (memory.device, memory.data_ptr(), memory.shape, memory.stride(), memory.dtype, self.dtype)

    def load(self) -> Tensor:
        """Read it into new memory, in the dtype in which it is used."""
        return (self.memory if self.file is None else self.file.read(self.name)).to(self.dtype)

    def read_into(self, target: Tensor, start: int) -> None:
        """Fill a flat tensor on the CPU with the elements from `start` on, cast to its dtype."""
        stored = self.memory.dtype
        if self.file is None:
            target.copy_(self.memory.detach().reshape(-1)[start : start + target.numel()])
            return
        raw = target if target.dtype == stored else torch.empty(target.numel(), dtype=stored, device="cpu")
        begin = self.file.entries[self.name].begin + start * stored.itemsize
        self.file.read_into(raw.view(torch.uint8), begin)
        if raw is not target:
            target.copy_(raw)


SUFFIX = ".dat"


def offload_weight(
    weight: Tensor,
    weight_name: str,
    offload_folder: str | os.PathLike[str],
    index: Index | None = None,
) -> Index:
    """Write the raw bytes of one tensor to `<name>.dat`.

    Args:
        weight: The tensor, not on the meta device.
        weight_name: Its name.
        offload_folder: An existing folder.
        index: The index to which its entry (`dtype`, `shape`) is added; a new one by default.

    Raises:
        CheckpointError: The name is a path outside of the folder.
        CheckpointWriteError: The file cannot be written, such as on a full disk.
    """
    path = _tensor_file(Path(offload_folder), weight_name)
    _write(path, as_bytes(weight.detach().to("cpu")), f"the weight {weight_name!r}")
    index = {} if index is None else index
    index[weight_name] = {"dtype": str(weight.dtype).removeprefix("torch."), "shape": list(weight.shape)}
    return index


def load_offloaded_weight(weight_file: str | os.PathLike[str], weight_info: Mapping[str, Any]) -> Tensor:
    """Map a tensor that `offload_weight` wrote; nothing is read until it is used.

    Raises:
        CheckpointError: The file has another size than its entry.
    """
    dtype = torch_dtype(weight_info["dtype"]) or torch.float32
    shape = tuple(weight_info["shape"])
    count = math.prod(shape)
    if not count:
        return torch.empty(shape, dtype=dtype, device="cpu")
    size, needed = Path(weight_file).stat().st_size, count * dtype.itemsize
    if size != needed:
        raise CheckpointError(
            f"{str(weight_file)!r} {'is truncated' if size < needed else 'holds something else'}: "
            f"{list(shape)} of {dtype} are {needed} bytes, the file has {size}"
        )
    return torch.from_file(str(weight_file), shared=False, size=count, dtype=dtype).view(shape)


def offload_state_dict(save_dir: str | os.PathLike[str], state_dict: Mapping[str, Tensor]) -> None:
    """Write a state dict as a folder of offloaded weights. Tied weights share one file with several names.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     offload_state_dict(folder, {"w": torch.ones(2)})
        ...     OffloadedWeightsLoader(save_folder=folder)["w"]
        tensor([1., 1.])
    """
    Path(save_dir).mkdir(parents=True, exist_ok=True)
    index: Index = {}
    written: dict[tuple[object, ...], str] = {}
    for name, tensor in state_dict.items():
        key = (tensor_memory(tensor), tensor.dtype)
        first = written.setdefault(key, name) if tensor.numel() else name
        if first == name or not _link(Path(save_dir), first, name):
            offload_weight(tensor, name, save_dir, index)
        else:
            index[name] = dict(index[first])
    save_offload_index(index, save_dir)


def offload_from_model(folder: str | os.PathLike[str], tensors: Mapping[str, Tensor]) -> None:
    """Write tensors of a model that a folder lacks, with a checksum of samples of their values.

    Raises:
        SettingsError: The folder has other values of a tensor, from another model.
    """
    index = _read_index(folder)
    checksums = {name: _checksum(tensor) for name, tensor in tensors.items()}
    others = [name for name, sum_ in checksums.items() if index.get(name, {}).get("checksum", sum_) != sum_]
    if others:
        raise SettingsError(
            f"the folder {str(folder)!r} has other values for {some_of(others)} than this model: "
            "another model was offloaded there. Choose a folder of its own for each model. If its values "
            "are meant, create this model on the meta device (init_empty_weights)"
        )
    new = {name: tensor for name, tensor in tensors.items() if name not in index}
    offload_state_dict(folder, new)
    written = _read_index(folder)
    save_offload_index({name: {**written[name], "checksum": checksums[name]} for name in new}, folder)


def _checksum(tensor: Tensor) -> int:
    flat = tensor.detach().reshape(-1)
    return zlib.crc32(as_bytes(flat[:: max(1, flat.numel() // 4096)].to("cpu")))


def load_offloaded_weights(
    model: nn.Module, index: Mapping[str, Mapping[str, Any]], offload_folder: str | os.PathLike[str]
) -> None:
    """Set a model's tensors to the mapped tensors of an offload folder, on the CPU."""
    if not index:
        return
    weights = OffloadedWeightsLoader(save_folder=offload_folder, index=index)
    for name in index:
        set_module_tensor_to_device(model, name, "cpu", value=weights[name])


def extract_submodules_state_dict(
    state_dict: Mapping[str, Tensor], submodule_names: Iterable[str]
) -> dict[str, Tensor]:
    """Return the entries of a state dict that belong to some modules.

    Example:
        >>> list(extract_submodules_state_dict({"a.w": torch.ones(1), "ab.w": torch.ones(1)}, ["a"]))
        ['a.w']
    """
    modules = set(submodule_names)
    return {name: tensor for name, tensor in state_dict.items() if entry_of(name, modules) is not None}


class PrefixedDataset(Mapping[str, Any]):
    """A view of a mapping for one module: keys are looked up with its prefix."""

    def __init__(self, dataset: Mapping[str, Any], prefix: str) -> None:
        self.dataset = dataset
        self.prefix = prefix

    def __getitem__(self, key: str) -> Any:
        return self.dataset[f"{self.prefix}{key}"]

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and f"{self.prefix}{key}" in self.dataset

    def __iter__(self) -> Iterator[str]:
        cut = len(self.prefix)
        return (key[cut:] for key in self.dataset if key.startswith(self.prefix))

    def __len__(self) -> int:
        return sum(1 for _ in self)


class OffloadedWeightsLoader(Mapping[str, Any]):
    """All weights of an offloaded model: in a state dict, in `.dat` files, or in place in a checkpoint.

    Files are opened and their headers read once; looking up a mapped tensor again returns the same object.

    Args:
        state_dict: Tensors in memory.
        save_folder: A folder written by `offload_state_dict`.
        index: Name to entry: `dtype` and `shape` of a `.dat` file in `save_folder`, or `safetensors_file`,
            `weight_name` and `dtype`. By default the index of `save_folder`.
        device: The device to which tensors are moved when they are read; by default they stay mapped.

    Raises:
        SettingsError: The first three arguments are missing, or an entry needs a `save_folder`.
    """

    def __init__(
        self,
        state_dict: Mapping[str, Tensor] | None = None,
        save_folder: str | os.PathLike[str] | None = None,
        index: Mapping[str, Mapping[str, Any]] | None = None,
        device: int | str | torch.device | None = None,
    ) -> None:
        if state_dict is None and save_folder is None and index is None:
            raise SettingsError("offloaded weights need a state_dict, a save_folder or an index")
        self.state_dict = {} if state_dict is None else state_dict
        self.save_folder = save_folder
        if index is None and save_folder is not None:
            index = read_offload_index(save_folder)
        self.index = {} if index is None else index
        self.device = device
        self._files: dict[str, SafetensorsFile] = {}
        self._mapped: dict[str, Tensor] = {}
        self._by_inode: dict[tuple[int, int], Tensor] = {}

    def __getitem__(self, key: str) -> Tensor:
        if key in self.state_dict:
            return self.state_dict[key]
        if key in self._mapped:
            return self._mapped[key]
        tensor = self._open(key, self.index[key])
        return tensor if self.device is None else tensor.to(self.device)

    def __contains__(self, key: object) -> bool:
        return key in self.state_dict or key in self.index  # without reading it

    def __iter__(self) -> Iterator[str]:
        return iter({**dict.fromkeys(self.state_dict), **dict.fromkeys(self.index)})

    def __len__(self) -> int:
        return len({*self.state_dict, *self.index})

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy or pickle the tensors in memory; files are opened again, not read."""
        return OffloadedWeightsLoader, (dict(self.state_dict), self.save_folder, self.index, self.device)

    def stored(self, key: str) -> StoredTensor:
        """Return the storage of a weight without reading it."""
        entry = self.index.get(key, {})
        if key in self.state_dict or not entry.get("safetensors_file"):
            tensor = self[key]
            return StoredTensor(memory=tensor, dtype=tensor.dtype)
        path, name = str(entry["safetensors_file"]), entry.get("weight_name", key)
        if path not in self._files:
            self._files[path] = SafetensorsFile(path)
        file = self._files[path]
        if name not in file.entries:
            raise CheckpointError(f"{path!r} has no tensor {name!r}, which the offload index names")
        memory = file.tensor(name)
        return StoredTensor(
            memory=memory, dtype=torch_dtype(entry.get("dtype")) or memory.dtype, file=file, name=name
        )

    def _open(self, key: str, entry: Mapping[str, Any]) -> Tensor:
        if entry.get("safetensors_file"):
            stored = self.stored(key)
            if stored.is_cast:
                return stored.load()  # read each time, or memory would fill
            self._mapped[key] = stored.memory
        elif self.save_folder is None:
            raise SettingsError(f"{key!r} is in a .dat file: pass its save_folder")
        else:
            path = _tensor_file(Path(self.save_folder), key)
            facts = path.stat()  # tied weights are one file with several names
            inode = (facts.st_dev, facts.st_ino)
            if inode not in self._by_inode:
                self._by_inode[inode] = load_offloaded_weight(path, entry)
            self._mapped[key] = self._by_inode[inode]
        return self._mapped[key]


def _link(folder: Path, first: str, name: str) -> bool:
    """Hard-link a weight's file to another name, if the file system supports it."""
    target = _tensor_file(folder, name)
    temporary = target.with_name(f"{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        temporary.hardlink_to(_tensor_file(folder, first))
        temporary.replace(target)
    except OSError:
        return False
    finally:
        temporary.unlink(missing_ok=True)  # replacing a file by a link to itself leaves both names
    return True


def _tensor_file(folder: Path, name: str) -> Path:
    if os.sep in name or name in {"", ".", ".."} or (os.altsep and os.altsep in name):
        raise CheckpointError(f"the weight {name!r} cannot be the name of a file in {str(folder)!r}")
    return folder / f"{name}{SUFFIX}"


def collect_weights(
    model: nn.Module,
    offloaded: Mapping[str, Device],
    tied: Sequence[Sequence[str]],
    *,
    state_dict: Mapping[str, Tensor] | None,
    offload_dir: str | os.PathLike[str] | None,
    offload_index: Mapping[str, Mapping[str, Any]] | None,
    offload_buffers: bool,
) -> OffloadedWeightsLoader:
    """Collect the offloaded weights of a model, and write those for the disk that are not there yet.

    Raises:
        SettingsError: Weights are assigned to the disk, but there is no folder for them.
    """
    on_disk: list[str] = []
    on_cpu: list[str] = []
    for name, device in offloaded.items():
        (on_disk if device == "disk" else on_cpu).append(name)
    values = {
        name: tensor.data
        for name, tensor in model_tensors(model).items()
        if (offload_buffers or isinstance(tensor, nn.Parameter)) and not tensor.is_meta
    }
    held = extract_submodules_state_dict(values, on_cpu)
    if state_dict is not None:
        held = {name: tensor for name, tensor in state_dict.items() if not tensor.is_meta}
    copies: dict[tuple[object, ...], Tensor] = {}  # tied weights stay one tensor
    for name in extract_submodules_state_dict(held, on_cpu):
        key = (tensor_memory(held[name]), held[name].dtype)
        held[name] = copies.setdefault(key, held[name].to("cpu"))
    index: dict[str, Mapping[str, Any]] = {**_read_index(offload_dir), **(offload_index or {})}
    writable = extract_submodules_state_dict(values, on_disk)
    # A tied weight without an entry is read from that of another name.
    for group in tied:
        source = next((name for name in group if name in held or name in index), None)
        real = next((values[name] for name in group if name in values), None)
        for name in group:
            if name in held or name in index or entry_of(name, offloaded) is None:
                continue
            if source in held:
                held[name] = held[source]
            elif source is not None and index[source].get("safetensors_file"):
                index[name] = {"weight_name": source, **index[source]}
            elif real is not None and name not in writable:
                held[name] = real.to("cpu")
    to_write: dict[str, Tensor] = {}
    for name, tensor in writable.items():
        is_there = name in (offload_index or ()) or index.get(name, {}).get("safetensors_file")
        if not is_there and name not in held:
            to_write[name] = tensor
    if to_write.keys() - index.keys() and offload_dir is None:
        raise SettingsError(
            f"the device_map sends {some_of(map(repr, on_disk))} to the disk: pass offload_dir, "
            "the folder for their weights, or offload_index, where they lie"
        )
    if to_write and offload_dir is not None:
        offload_from_model(offload_dir, to_write)
        index = {**_read_index(offload_dir), **index}
    return OffloadedWeightsLoader(state_dict=held, save_folder=offload_dir, index=index)


def _read_index(folder: str | os.PathLike[str] | None) -> dict[str, Mapping[str, Any]]:
    if folder is None or not (Path(folder) / OFFLOAD_INDEX_NAME).is_file():
        return {}
    return dict(read_offload_index(folder))
