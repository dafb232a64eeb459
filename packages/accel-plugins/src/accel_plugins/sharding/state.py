"""Sharded state dicts of models and optimizers by fully qualified name, and the names of their files."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn

from accel_ops.modules import extract_model_from_parallel
from accel_state.errors import CheckpointError
from accel_state.remote import AnyPath

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from accel_plugins.strategy import StateDict

StateAllocator: TypeAlias = "Callable[[str, str, torch.Size, torch.dtype], Any]"
"""Returns the destination tensor of a state, given the names of parameter and state, full shape and dtype; or
`ABSENT`."""


class Absent(Enum):
    """The type of `ABSENT`."""

    VALUE = auto()


ABSENT = Absent.VALUE
"""Marks a value that only other ranks have: this rank neither writes nor reads it."""


class StateForm(Enum):
    """The form in which `save_state` writes models and optimizers."""

    FULL = auto()
    """Rank 0 writes the full state dict: `model.safetensors`, `optimizer.bin`."""
    SHARDED = auto()
    """Every rank writes its shards, to a folder that PyTorch Distributed Checkpoint reads."""
    NATIVE = auto()
    """The strategy writes its own files."""


def allocator_like(parameters: Mapping[str, Tensor]) -> StateAllocator:
    """Return an allocator of tensors sharded like the parameter of the same name and shape, else full."""

    def allocate(name: str, key: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        del key
        parameter = parameters.get(name)
        if parameter is not None and parameter.shape == shape and shape:
            return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
        return torch.empty(shape, dtype=dtype, device="cpu")

    return allocate


def model_variables(model: nn.Module) -> StateDict:
    """Return the state dict of a model, with its parameters themselves, without prefixes of wrappers."""
    state = extract_model_from_parallel(model, keep_torch_compile=False).state_dict(keep_vars=True)
    return {strip_wrapper_prefixes(name): value for name, value in state.items()}


def state_by_name(state: Mapping[str, Any], names: Sequence[Sequence[str]]) -> StateDict:
    """Replace the parameter indices of an optimizer's state dict by names."""
    counts = [len(group["params"]) for group in state["param_groups"]]
    if counts != [*map(len, names)]:
        raise CheckpointError(
            f"The saved optimizer has groups of {counts} parameters, but the prepared one has groups of "
            f"{[*map(len, names)]}. Build it as in the saved run."
        )
    name_of: dict[int, str] = {}
    for group, group_names in zip(state["param_groups"], names, strict=True):
        name_of |= zip(group["params"], group_names, strict=True)
    return {
        **state,
        "state": {name_of[index]: dict(values) for index, values in state["state"].items()},
        "param_groups": [
            {**group, "params": list(group_names)}
            for group, group_names in zip(state["param_groups"], names, strict=True)
        ],
    }


def state_by_index(state: Mapping[str, Any], names: Sequence[Sequence[str]]) -> StateDict:
    """Replace the names of `state_by_name` with parameter indices; the order within a group may differ."""
    check_groups([group["params"] for group in state["param_groups"]], names)
    return names_to_indices(state, names)


def names_to_indices(state: Mapping[str, Any], names: Sequence[Sequence[str]]) -> StateDict:
    """Replace parameter names by indices; groups must match already."""
    indices: dict[str, int] = {}
    for group_names in names:
        for name in group_names:
            indices.setdefault(name, len(indices))
    return {
        **state,
        "state": {indices[name]: values for name, values in state["state"].items() if name in indices},
        "param_groups": [
            {**group, "params": [indices[name] for name in group_names]}
            for group, group_names in zip(state["param_groups"], names, strict=True)
        ],
    }


def check_groups(saved: Sequence[Sequence[str]], names: Sequence[Sequence[str]]) -> None:
    """Check that a saved optimizer has the same parameters as the one that loads it."""
    if len(saved) != len(names):
        raise CheckpointError(
            f"The saved optimizer has {len(saved)} parameter group(s), this run's has {len(names)}: build "
            "the optimizer as in the run that was saved."
        )
    for index, (then, now) in enumerate(zip(saved, names, strict=True)):
        gone, new = sorted({*then} - {*now}), sorted({*now} - {*then})
        if gone or new:
            only = f"only in the checkpoint {gone[:3]}" if gone else f"only in this optimizer {new[:3]}"
            raise CheckpointError(
                f"Group {index} of the saved optimizer has other parameters than this optimizer: {only}. "
                "Build the model and the optimizer as in the run that was saved."
            )


# The prefixes of FSDP1, of activation checkpointing and of compiled modules.
_WRAPPER_PREFIXES = re.compile(
    r"(?:^|(?<=\.))(?:_fsdp_wrapped_module|_checkpoint_wrapped_module|_orig_mod)\."
)


def strip_wrapper_prefixes(name: str) -> str:
    """Remove the prefixes of wrappers from a parameter's name."""
    return _WRAPPER_PREFIXES.sub("", name)


def parameter_names(optimizer: Optimizer, models: Sequence[nn.Module]) -> list[list[str]]:
    """Return the names of an optimizer's parameters, group by group.

    If they belong to several models, names begin with the model's index; a parameter of no model is named by
    its group and position.
    """
    owners: dict[int, tuple[int, str]] = {}
    for model_index, model in enumerate(models):
        inside = extract_model_from_parallel(model, keep_torch_compile=False)
        for name, parameter in inside.named_parameters(remove_duplicate=False):
            owners.setdefault(id(parameter), (model_index, strip_wrapper_prefixes(name)))
    groups: list[list[Tensor]] = [group["params"] for group in optimizer.param_groups]
    model_indices = {
        owners[id(parameter)][0] for group in groups for parameter in group if id(parameter) in owners
    }
    named: list[list[str]] = []
    for index, group in enumerate(groups):
        named.append([])
        for position, parameter in enumerate(group):
            owner, name = owners.get(id(parameter), (-1, f"param_groups.{index}.{position}"))
            named[-1].append(f"{owner}.{name}" if owner >= 0 and len(model_indices) > 1 else name)
    return named


INDEX_NAME = ".metadata"


def is_sharded_folder(folder: AnyPath) -> bool:
    """Return whether a folder has a DCP index."""
    return (folder / INDEX_NAME).is_file()


def shard_file(rank: int) -> str:
    """Return the name of a rank's file of shards."""
    return f"__{rank}_0.distcp"


def local_metadata_file(rank: int) -> str:
    """Return the name of a rank's metadata file, which exists only while the folder is written."""
    return f"__{rank}.note"
