"""Read the folder of a checkpoint that DeepSpeed's engine has written: weights and optimizer state, whole.

The layout is that of https://github.com/deepspeedai/DeepSpeed/blob/master/deepspeed/utils/zero_to_fp32.py.
DeepSpeed need not be installed.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from accel_plugins.deepspeed.unpickle import load_file
from accel_state.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor

_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
LATEST = "latest"
"""The file in which DeepSpeed says which folder it has written last."""
_OPTIMIZER = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFolder:
    """The files of one checkpoint, read as far as names and shapes are concerned.

    Args:
        folder: Where it is.
        models: The contents of the files of models, by rank; one alone where parameters are not divided.
        optimizers: The same of optimizers; none where nothing is divided.
    """

    folder: Path
    models: Sequence[Mapping[str, Any]]
    optimizers: Sequence[Mapping[str, Any]]

    @property
    def stage(self) -> int:
        """What was divided, 0 to 3."""
        return int(self.optimizers[0]["zero_stage"]) if self.optimizers else 0

    def weights(self) -> dict[str, Tensor]:
        """The state dict of the model; in float32 where the engine has kept its weights so."""
        first = self.models[0]
        sharded = self.stage == 3
        found = {
            name: value
            for name, value in first["module"].items()
            if not sharded or name in first["buffer_names"] or not isinstance(value, torch.Tensor)
        }
        if sharded:
            found |= self._frozen()
        if self.optimizers:
            key = "fp32_flat_groups" if sharded else "single_partition_of_fp32_groups"
            found |= dict(self._unflatten([one[key] for one in self.optimizers]))
        for name, same in (first.get("shared_params") or {}).items():
            if same in found:
                found[name] = found[same]
        return found

    def numbered_optimizer(self) -> dict[str, Any] | None:
        """The state dict of the optimizer at stage 0, as torch has it; `None` for other stages.

        Raises:
            CheckpointError: The optimizer has float32 copies of weights in 16 bits.
        """
        if self.optimizers:
            return None
        state = self.models[0].get("optimizer")
        if not isinstance(state, dict) or not {"state", "param_groups"} <= {*state}:
            raise CheckpointError(
                f"{str(self.folder)!r} is of ZeRO stage 0 with weights in 16 bits, whose optimizer state is "
                "not read; load it with DeepSpeed at stage 0."
            )
        return cast("dict[str, Any]", state)

    def optimizer(self) -> dict[str, Any]:
        """The state dict of the optimizer of a stage above 0, where names stand for parameters.

        Raises:
            CheckpointError: It does not belong to single parameters.
        """
        key = "optimizer_state_dict" if self.stage == 3 else "base_optimizer_state"
        bases = [one[key] for one in self.optimizers]
        if not all(isinstance(base, dict) for base in bases):
            raise CheckpointError(
                f"{str(self.folder)!r} was written with elastic_checkpoint, whose optimizer state is not "
                "read; load it with as many processes as it was saved by."
            )
        states: dict[str, dict[str, Any]] = {name: {} for name in self._names()}
        for name in sorted({key for base in bases for one in base["state"].values() for key in one}):
            shards = [
                [base["state"].get(index, {}).get(name) for index in self._indices(base)] for base in bases
            ]
            self._sort_in(states, name, shards)
        groups = [
            {**{key: value for key, value in group.items() if key != "params"}, "params": names}
            for group, names in zip(bases[0]["param_groups"], self._names_of_groups(bases[0]), strict=False)
        ]
        return {"state": {name: state for name, state in states.items() if state}, "param_groups": groups}

    def _indices(self, base: Mapping[str, Any]) -> list[int]:
        return [index for group in base["param_groups"] for index in group["params"]]

    def _names_of_groups(self, base: Mapping[str, Any]) -> Iterator[list[str]]:
        """The names of every group of the optimizer, which is one flat tensor, or in stage 3 several."""
        shapes = iter(self._shapes())
        for group in base["param_groups"]:
            yield [name for _, part in zip(group["params"], shapes, strict=False) for name in part]

    def _sort_in(self, states: dict[str, dict[str, Any]], name: str, shards: Sequence[Sequence[Any]]) -> None:
        """Give every parameter what the optimizer keeps under one name."""
        flat = [
            all(isinstance(one, torch.Tensor) and one.dim() for one in column)
            for column in zip(*shards, strict=True)
        ]
        if all(flat):
            for parameter, value in self._unflatten(shards):
                states[parameter][name] = value
            return
        for group, value in zip(self._shapes(), shards[0], strict=False):
            for parameter in group:  # each counts its own steps
                states[parameter][name] = value.clone() if isinstance(value, torch.Tensor) else value

    def _shapes(self) -> Sequence[Mapping[str, Any]]:
        return self.models[0]["param_shapes"]

    def _names(self) -> Iterator[str]:
        for group in self._shapes():
            yield from group

    def _frozen(self) -> dict[str, Tensor]:
        shapes = self.models[0].get("frozen_param_shapes") or {}
        return {
            name: torch.cat([one["frozen_param_fragments"][name] for one in self.models])[
                : _numel(shape)
            ].view(shape)
            for name, shape in shapes.items()
        }

    def _unflatten(self, shards: Sequence[Sequence[Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Take flat tensors apart: `shards` has those of every rank, one for each group of shapes."""
        apart = _by_parameter if self.stage == 3 else _by_range
        paddings = self.optimizers[0].get("param_alignment_paddings")
        for index, shapes in enumerate(self._shapes()):
            columns = [rank[index] for rank in shards]
            yield from apart(shapes, columns, None if paddings is None else paddings[index])


def read_folder(folder: Path) -> EngineFolder:
    """Read a checkpoint.

    Args:
        folder: With files such as `mp_rank_00_model_states.pt`.

    Raises:
        CheckpointError: Files are absent or damaged, or of models that are divided in other ways.
    """
    models, optimizers = _files(folder, _MODEL), _files(folder, _OPTIMIZER)
    if not models:
        raise CheckpointError(f"{str(folder)!r} has no *_model_states.pt: DeepSpeed has not written it.")
    states = [load_file(path)["optimizer_state_dict"] for path in optimizers]
    ranks = max(_counts(states[0]["partition_count"])) if states else 0
    if ranks != len(states):
        raise CheckpointError(f"{str(folder)!r} has the optimizer states of {len(states)} ranks of {ranks}.")
    return EngineFolder(folder=folder, models=[load_file(path) for path in models], optimizers=states)


def is_engine_folder(folder: Path) -> bool:
    """Whether DeepSpeed's engine has written a folder."""
    return folder.is_dir() and any(_MODEL.fullmatch(path.name) for path in folder.iterdir())


def engine_folder(directory: Path, name: str, index: int) -> Path:
    """The folder of a model in a checkpoint: under its name, or the first as DeepSpeed named it by itself.

    Args:
        directory: The checkpoint. The file `latest` in it says what `engine.save_checkpoint` wrote last.
        name: As a checkpoint of ours names it; if there is no such folder, the one in `latest` is taken.
        index: Which of several models; DeepSpeed by itself names one.
    """
    latest = directory / LATEST
    if not index and not is_engine_folder(directory / name) and latest.is_file():
        tag = latest.read_text().strip()
        if tag == Path(tag).name and is_engine_folder(directory / tag):
            return directory / tag
    return directory / name


def _counts(count: int | Sequence[int]) -> Sequence[int]:
    return [count] if isinstance(count, int) else count


def _files(folder: Path, pattern: re.Pattern[str]) -> list[Path]:
    """The files of a kind, by the rank that has written them."""
    found: list[tuple[int, Path]] = []
    for path in folder.iterdir() if folder.is_dir() else ():
        match = pattern.fullmatch(path.name)
        if match is not None and int(match[2]):
            raise CheckpointError(
                f"{str(path)!r} is of a model that tensor or pipeline parallelism divides, which is not read."
            )
        if match is not None:
            found.append((int(match[1] or 0), path))
    return [path for _, path in sorted(found)]


def _by_range(
    shapes: Mapping[str, Any], columns: Sequence[Tensor], paddings: Sequence[int] | None
) -> Iterator[tuple[str, Tensor]]:
    """Stages 1 and 2: one flat tensor of all parameters, of which each rank has a range."""
    full, offset = torch.cat([*columns]), 0
    for index, (name, shape) in enumerate(shapes.items()):
        yield name, full[offset : offset + _numel(shape)].view(torch.Size(shape))
        offset += _numel(shape) + (0 if paddings is None else paddings[index])


def _by_parameter(
    shapes: Mapping[str, Any], columns: Sequence[Tensor], paddings: Sequence[int] | None
) -> Iterator[tuple[str, Tensor]]:
    """Stage 3: every rank has an equal part of each parameter, one after the other."""
    del paddings
    offset = 0
    for name, shape in shapes.items():
        size = math.ceil(_numel(shape) / len(columns))
        full = torch.cat([column[offset : offset + size] for column in columns])
        yield name, full[: _numel(shape)].view(torch.Size(shape))
        offset += size


def _numel(shape: Any) -> int:
    return math.prod(shape)
