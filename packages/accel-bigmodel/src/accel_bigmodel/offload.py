"""Weights that stay on disk: the folder format, and a mapping that reads them in place."""

from __future__ import annotations

import math
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from accel_bigmodel.offload_index import check_offload_index, read_offload_index, save_offload_index
from accel_bigmodel.placement import set_module_tensor_to_device, torch_dtype
from accel_bigmodel.stored_tensor import StoredTensor, file_identity
from accel_ops.weights.safetensors_file import SafetensorsFile
from accel_ops.weights.stream import as_bytes
from accel_ops.weights.tensors import tensor_memory
from accel_state.errors import CheckpointError, CheckpointWriteError, SettingsError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from accel_bigmodel.offload_index import Index
    from accel_bigmodel.stored_tensor import FileIdentity
    from accel_ops.weights.safetensors_header import Entry

SUFFIX = ".dat"


def offload_weight(
    weight: Tensor,
    weight_name: str,
    offload_folder: str | os.PathLike[str],
    index: Index | None = None,
) -> Index:
    """Write one tensor to `<name>.dat`, as it lies in memory.

    Args:
        weight: The tensor, not on the meta device.
        weight_name: Its name.
        offload_folder: An existing folder.
        index: Where its entry (`dtype`, `shape`) is added; a new one by default.

    Raises:
        CheckpointError: The name leaves the folder.
        CheckpointWriteError: The file cannot be written, such as on a full disk.
    """
    path = _tensor_file(Path(offload_folder), weight_name)
    # Beside the target, then renamed: a model may have the old file mapped.
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        # Plain writes: a write through a mapping would end the process with SIGBUS on a full disk.
        with temporary.open("wb") as file:
            file.write(as_bytes(weight.detach().to("cpu")))
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise CheckpointWriteError(
            f"could not write the weight {weight_name!r} to {str(path)!r}: {error.strerror}"
        ) from error
    index = {} if index is None else index
    index[weight_name] = {"dtype": str(weight.dtype).removeprefix("torch."), "shape": list(weight.shape)}
    return index


def load_offloaded_weight(weight_file: str | os.PathLike[str], weight_info: Mapping[str, Any]) -> Tensor:
    """Map a tensor that `offload_weight` wrote; nothing is read until it is used.

    Raises:
        CheckpointError: The file has another size than the entry says, or the entry is damaged.
    """
    check_offload_index({Path(weight_file).stem: weight_info}, "the given weight_info")
    dtype = torch_dtype(weight_info["dtype"]) or torch.float32
    shape = tuple(weight_info["shape"])
    count = math.prod(shape)
    if not count:
        return torch.empty(shape, dtype=dtype)
    size, needed = Path(weight_file).stat().st_size, count * dtype.itemsize
    if size != needed:
        raise CheckpointError(
            f"{str(weight_file)!r} {'is truncated' if size < needed else 'holds something else'}: "
            f"{list(shape)} of {dtype} are {needed} bytes, the file has {size}"
        )
    return torch.from_file(str(weight_file), shared=False, size=count, dtype=dtype).view(shape)


def offload_state_dict(save_dir: str | os.PathLike[str], state_dict: Mapping[str, Tensor]) -> None:
    """Write a state dict as a folder of offloaded weights. Tied weights are one file with several names.

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


def load_offloaded_weights(
    model: nn.Module, index: Mapping[str, Mapping[str, Any]], offload_folder: str | os.PathLike[str]
) -> None:
    """Give a model the tensors of an offload folder, mapped, on the CPU."""
    if not index:
        return
    weights = OffloadedWeightsLoader(save_folder=offload_folder, index=index)
    for name in index:
        set_module_tensor_to_device(model, name, "cpu", value=weights[name])


def extract_submodules_state_dict(
    state_dict: Mapping[str, Tensor], submodule_names: Iterable[str]
) -> dict[str, Tensor]:
    """Take the part of a state dict that belongs to some modules.

    Example:
        >>> list(extract_submodules_state_dict({"a.w": torch.ones(1), "ab.w": torch.ones(1)}, ["a"]))
        ['a.w']
    """
    prefixes = tuple(f"{name}." if name else "" for name in submodule_names)
    names = set(submodule_names)
    return {name: tensor for name, tensor in state_dict.items() if name in names or name.startswith(prefixes)}


class PrefixedDataset(Mapping[str, Any]):
    """A mapping as one module sees it: keys have its prefix added."""

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

    Files are opened and their headers read once; asking twice for a mapped tensor gives the same object.

    Args:
        state_dict: Tensors that are in memory.
        save_folder: A folder that `offload_state_dict` wrote.
        index: Name to entry: `dtype` and `shape` of a `.dat` file in `save_folder`, or `safetensors_file`,
            `weight_name` and `dtype`. By default that of `save_folder`.
        device: Move what is read there; by default it stays mapped.

    Raises:
        CheckpointError: An entry of the index is damaged.
        SettingsError: None of the first three is given, or an entry needs a `save_folder`.
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
        elif index is not None:
            check_offload_index(index, "the given index")
        self.index = {} if index is None else index
        self.device = device
        self._files: dict[str, SafetensorsFile] = {}
        self._identified: dict[str, FileIdentity] = {}
        self._mapped: dict[str, Tensor] = {}

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

    def file_of(self, key: str) -> tuple[SafetensorsFile, str] | None:
        """Return the safetensors file of a weight and its name there; `None` if it lies elsewhere."""
        entry = self.index.get(key, {})
        if key in self.state_dict or not entry.get("safetensors_file"):
            return None
        path = str(entry["safetensors_file"])
        if path not in self._files:
            identity = file_identity(path)
            self._files[path] = SafetensorsFile(path)
            self._identified[path] = identity
        return self._files[path], entry.get("weight_name", key)

    def stored(self, key: str) -> StoredTensor:
        """Describe where a weight's bytes are, without reading any."""
        located = self.file_of(key)
        if located is None:
            tensor = self[key]
            return StoredTensor(
                shape=tuple(tensor.shape),
                stored=tensor.dtype,
                dtype=tensor.dtype,
                memory=tensor,
                file=None if key in self.state_dict else self._identified[key],
            )
        file, name = located
        entry = _entry(file, name)
        wanted = torch_dtype(self.index[key].get("dtype")) or entry.dtype
        return StoredTensor(
            shape=entry.shape,
            stored=entry.dtype,
            dtype=wanted,
            memory=file.tensor(name),
            file=self._identified[str(self.index[key]["safetensors_file"])],
            begin=entry.begin,
        )

    def _open(self, key: str, entry: Mapping[str, Any]) -> Tensor:
        located = self.file_of(key)
        if located is None:
            if self.save_folder is None:
                raise SettingsError(f"{key!r} is in a .dat file: say in which save_folder")
            path = _tensor_file(Path(self.save_folder), key)
            self._identified[key] = file_identity(path)
            self._mapped[key] = load_offloaded_weight(path, entry)
            return self._mapped[key]
        file, name = located
        wanted = torch_dtype(entry.get("dtype"))
        if wanted not in (None, _entry(file, name).dtype):
            return self.stored(key).load()  # anew each time, or memory would fill
        self._mapped[key] = file.tensor(name)
        return self._mapped[key]


def _entry(file: SafetensorsFile, name: str) -> Entry:
    if name not in file.entries:
        raise CheckpointError(f"{str(file.path)!r} has no tensor {name!r}, which the offload index names")
    return file.entries[name]


def _link(folder: Path, first: str, name: str) -> bool:
    """Give a weight's file another name, where the file system can."""
    target = _tensor_file(folder, name)
    temporary = target.with_name(f"{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        temporary.hardlink_to(_tensor_file(folder, first))
        temporary.replace(target)
    except OSError:
        return False
    finally:
        temporary.unlink(missing_ok=True)  # replacing a file by itself leaves both names
    return True


def _tensor_file(folder: Path, name: str) -> Path:
    if os.sep in name or name in {"", ".", ".."} or (os.altsep and os.altsep in name):
        raise CheckpointError(f"the weight {name!r} cannot be the name of a file in {str(folder)!r}")
    return folder / f"{name}{SUFFIX}"
