"""Read checkpoint folders of DeepSpeed's engines without executing code from the files.

The layout is that of https://github.com/deepspeedai/DeepSpeed/blob/master/deepspeed/utils/zero_to_fp32.py.
DeepSpeed need not be installed.
"""

from __future__ import annotations

import copy
import math
import pickle
import pkgutil
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from accel_plugins.strategy import ForeignFiles
from accel_state.errors import CheckpointError
from accel_state.frozen import frozen
from accel_state.remote import AnyPath

_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
LATEST = "latest"
"""The file that names the folder written last by DeepSpeed."""
_OPTIMIZER = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")


def read_folder(folder: Path) -> EngineFolder:
    """Read a checkpoint folder."""
    models, optimizers = _list_files(folder, _MODEL), _list_files(folder, _OPTIMIZER)
    if not models:
        raise CheckpointError(f"{str(folder)!r} has no *_model_states.pt: it is not a DeepSpeed checkpoint.")
    states = [load_file(path)["optimizer_state_dict"] for path in optimizers]
    counts = states[0]["partition_count"] if states else 0
    ranks = counts if isinstance(counts, int) else max(counts)
    if ranks != len(states):
        raise CheckpointError(
            f"{str(folder)!r} has the optimizer states of {len(states)} ranks of {ranks}. Copy the "
            "files of all ranks into it."
        )
    return EngineFolder(folder=folder, models=[load_file(path) for path in models], optimizers=states)


def is_engine_folder(folder: AnyPath) -> bool:
    """Return whether a folder has files of DeepSpeed's engine."""
    return folder.is_dir() and any(_MODEL.fullmatch(path.name) for path in folder.iterdir())


def engine_folder(directory: AnyPath, name: str, index: int) -> AnyPath:
    """Return a model's folder in a checkpoint: by its name, else as named in the file `latest`."""
    latest = directory / LATEST
    if not index and not is_engine_folder(directory / name) and latest.is_file():
        tag = latest.read_text().strip()
        if tag == Path(tag).name and is_engine_folder(directory / tag):
            return directory / tag
    return directory / name


def model_file(folder: Path, tensor_rank: int) -> Path:
    """Return the file of a model's weights on a tensor-parallel rank, of stages that do not shard them."""
    return folder / f"mp_rank_{tensor_rank:02d}_model_states.pt"


def _list_files(folder: Path, pattern: re.Pattern[str]) -> list[Path]:
    """Return the files whose names match a pattern, in the order of ranks."""
    paths: dict[int, Path] = {}
    for path in folder.iterdir() if folder.is_dir() else ():
        if match := pattern.fullmatch(path.name):
            if int(match[2]):
                raise CheckpointError(
                    f"{str(path)!r} is of a tensor- or pipeline-parallel model, which cannot be converted. "
                    "Load it with the engine that saved it."
                )
            paths[int(match[1] or 0)] = path
    return [paths[rank] for rank in sorted(paths)]


Assemble = Callable[[Sequence[Tensor], torch.Size], Any]
"""Builds a tensor of a shape from consecutive flat parts of its elements."""


def joined(parts: Sequence[Tensor], shape: torch.Size) -> Tensor:
    """Concatenate flat parts into a tensor of a shape."""
    return torch.cat([*parts]).view(shape)


def range_of(parts: Sequence[Tensor], begin: int, size: int) -> list[Tensor]:
    """Return the flat slices of consecutive parts that cover a range of elements.

    Example:
        >>> range_of([torch.arange(3), torch.arange(3, 6)], 2, 2)
        [tensor([2]), tensor([3])]
    """
    within: list[Tensor] = []
    for part in parts:
        if max(0, begin) < min(len(part), begin + size):
            within.append(part[max(0, begin) : begin + size])
        begin -= len(part)
    return within or [parts[0][:0]]


@frozen
class EngineFolder:
    """The files of one checkpoint; tensors are memory-mapped.

    There is a single model file if parameters are not sharded, and no optimizer file at stage 0.
    """

    folder: Path
    models: Sequence[Mapping[str, Any]]
    optimizers: Sequence[Mapping[str, Any]]

    @property
    def stage(self) -> int:
        """ZeRO stage, 0 to 3."""
        return int(self.optimizers[0]["zero_stage"]) if self.optimizers else 0

    def weights(self, assemble: Assemble = joined) -> dict[str, Any]:
        """Return the model's full state dict, with the float32 master weights if there are any."""
        first = self.models[0]
        is_sharded = self.stage == 3
        weights = {
            name: value
            for name, value in first["module"].items()
            if not is_sharded or name in first["buffer_names"] or not isinstance(value, torch.Tensor)
        }
        if is_sharded:
            for name, shape in (first.get("frozen_param_shapes") or {}).items():
                parts = [model["frozen_param_fragments"][name].flatten() for model in self.models]
                weights[name] = assemble(range_of(parts, 0, math.prod(shape)), torch.Size(shape))
        if self.optimizers:
            key = "fp32_flat_groups" if is_sharded else "single_partition_of_fp32_groups"
            weights |= dict(self._unflatten([state[key] for state in self.optimizers], assemble))
        for name, tied in (first.get("shared_params") or {}).items():
            if tied in weights:
                weights[name] = weights[tied]
        return weights

    def numbered_optimizer(self) -> dict[str, Any] | None:
        """Return the optimizer's state dict at stage 0, as torch has it; `None` for other stages."""
        if self.optimizers:
            return None
        state = self.models[0].get("optimizer")
        if not isinstance(state, dict) or not {"state", "param_groups"} <= {*state}:
            raise CheckpointError(
                f"{str(self.folder)!r} is of ZeRO stage 0 with 16-bit weights, whose optimizer state cannot "
                "be converted. Load it with DeepSpeed at stage 0."
            )
        return cast("dict[str, Any]", state)

    def optimizer(self, assemble: Assemble = joined) -> dict[str, Any]:
        """Return the optimizer's full state dict at a stage above 0, with parameters by name."""
        key = "optimizer_state_dict" if self.stage == 3 else "base_optimizer_state"
        bases = [state[key] for state in self.optimizers]
        if not all(isinstance(base, dict) for base in bases):
            raise CheckpointError(
                f"{str(self.folder)!r} was written with elastic_checkpoint, whose optimizer state cannot be "
                "converted. Load it with the world size with which it was saved."
            )
        states: dict[str, dict[str, Any]] = {name: {} for group in self._shapes() for name in group}
        for name in sorted({name for base in bases for entry in base["state"].values() for name in entry}):
            shards = [
                [
                    base["state"].get(i, {}).get(name)
                    for group in base["param_groups"]
                    for i in group["params"]
                ]
                for base in bases
            ]
            if all(isinstance(value, Tensor) and value.dim() for rank in shards for value in rank):
                for parameter, value in self._unflatten(shards, assemble):
                    states[parameter][name] = value
                continue
            for group, value in zip(self._shapes(), shards[0], strict=False):
                for parameter in group:  # Each parameter has its own step.
                    states[parameter][name] = copy.deepcopy(value)
        shapes = iter(self._shapes())  # a group has one flat tensor, or several at stage 3
        groups = [
            {
                **group,
                "params": [name for _, names in zip(group["params"], shapes, strict=False) for name in names],
            }
            for group in bases[0]["param_groups"]
        ]
        return {"state": {name: state for name, state in states.items() if state}, "param_groups": groups}

    def _shapes(self) -> Sequence[Mapping[str, Any]]:
        return self.models[0]["param_shapes"]

    def _unflatten(self, shards: Sequence[Sequence[Tensor]], assemble: Assemble) -> Iterator[tuple[str, Any]]:
        """Split flat tensors by parameter: `shards` has those of each rank, one per group of shapes."""
        paddings = self.optimizers[0].get("param_alignment_paddings")
        for group, shapes in enumerate(self._shapes()):
            columns = [rank[group] for rank in shards]
            offset = 0
            for index, (name, shape) in enumerate(shapes.items()):
                numel = math.prod(shape)
                if self.stage == 3:  # every rank has an equal shard of each parameter, consecutively
                    size = math.ceil(numel / len(columns))
                    parts = range_of([column[offset : offset + size] for column in columns], 0, numel)
                    offset += size
                else:  # one flat tensor of all parameters, of which each rank has a range
                    parts = range_of(columns, offset, numel)
                    offset += numel + (0 if paddings is None else paddings[group][index])
                yield name, assemble(parts, torch.Size(shape))


def load_file(path: Path, *, for_engine: bool = False) -> dict[str, Any]:
    """Read one file without executing code of it; tensors are memory-mapped on the CPU.

    Objects of DeepSpeed and Megatron are placeholders; an engine gets those of the classes that it needs.

    Raises:
        CheckpointError: The file is damaged, or has objects of classes that are not allowed.
    """
    try:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(path)
        known: Any = [(_class_of(name, for_engine=for_engine), name) for name in names]
        with torch.serialization.safe_globals(known):
            return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, OSError, EOFError, ValueError) as error:
        raise CheckpointError(f"{str(path)!r} cannot be read: {str(error).splitlines()[0]}.") from error


_OF_ENGINES = {
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.utils.tensor_fragment.fragment_address",
}
"""The classes that an engine needs; each only stores its arguments."""


class _Placeholder:
    """An object of DeepSpeed's or Megatron's, with its plain contents only."""

    def __init__(self, *args: Any) -> None:
        self.args = args


def _class_of(name: str, *, for_engine: bool) -> Any:
    if for_engine and name in _OF_ENGINES:
        return pkgutil.resolve_name(name)
    if name.endswith(".ZeroStageEnum"):
        return int
    # The last one has Megatron's arguments.
    if not for_engine and (name.startswith(("deepspeed.", "megatron.")) or name == "argparse.Namespace"):
        return _Placeholder
    raise pickle.UnpicklingError(f"{name} is not allowed in a checkpoint")


def _find(directory: AnyPath, name: str, index: int) -> AnyPath | None:
    folder = engine_folder(directory, name, index)
    return folder if is_engine_folder(folder) else None


FILES = ForeignFiles(find=_find, read=read_folder)
"""The files of engines, for other strategies."""
