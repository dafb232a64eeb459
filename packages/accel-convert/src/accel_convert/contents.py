"""Contents of a checkpoint of any format, as returned by readers and passed to writers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from torch import Tensor

from accel_ops.weights.layout import INDEX_SUFFIX, MODEL_NAME, SAFE_MODEL_NAME
from accel_ops.weights.lazy_tensors import LazyTensor
from accel_state.errors import some_of
from accel_state.frozen import frozen
from accel_state.remote import AnyPath
from accel_train.checkpoint import layout
from accel_train.checkpoint.files import sizes_in
from accel_train.checkpoint.folder import check, read_manifest
from accel_train.checkpoint.layout import Manifest

_READ = (SAFE_MODEL_NAME, MODEL_NAME, layout.OPTIMIZER_NAME, layout.MANIFEST_NAME)
"""How the names of those files and folders of a state begin whose contents are read."""


@frozen
class OptimizerContents:
    """The state of an optimizer.

    Attributes:
        states: The states of each parameter, by name, or by number if names are unknown.
        groups: The parameter groups, `"params"` with names or numbers likewise.
        unnamed: The reason why names are unknown; empty if they are known.
    """

    states: Mapping[str | int, Mapping[str, Any]]
    groups: Sequence[Mapping[str, Any]]
    unnamed: str = ""

    def order(self) -> list[str | int]:
        """Return the parameters in the order of the groups, which is also the order of their numbers."""
        return [name for group in self.groups for name in group["params"]]

    def tensors(self) -> Iterator[tuple[Label, LazyTensor]]:
        """Yield all tensors, with the keys that lead to each in the state dict by number."""
        for path, leaf in leaves(self.nested(by_number=True)):
            if isinstance(leaf, LazyTensor):
                yield path, leaf

    def nested(self, *, by_number: bool) -> dict[str, Any]:
        """Return a state dict, with parameters by number, as in `Optimizer.state_dict`, or by name."""
        order = self.order()
        key_of = {name: number if by_number else name for number, name in enumerate(order)}
        return {
            "state": {key_of[name]: dict(values) for name, values in self.states.items() if name in key_of},
            "param_groups": [
                {**group, "params": [key_of[name] for name in group["params"]]} for group in self.groups
            ],
        }


@dataclass
class CheckpointContents:
    """The contents of a checkpoint, which its reader fills; tensors are read lazily.

    Attributes:
        form: Its format, in words.
        models: The weights of each model, by name.
        optimizers: Their optimizers, in the same order.
        state_files: Other files of `save_state` by name: schedulers, positions of loaders, random numbers.
        config_files: Files beside the weights that describe the model: its configuration and tokenizer.
        manifest: The manifest of a state.
        dropped: A phrase for each item that no target format can store.
    """

    form: str
    models: list[Mapping[str, LazyTensor]] = field(default_factory=list[Mapping[str, LazyTensor]])
    optimizers: list[OptimizerContents] = field(default_factory=list[OptimizerContents])
    state_files: dict[str, AnyPath] = field(default_factory=dict[str, AnyPath])
    config_files: dict[str, AnyPath] = field(default_factory=dict[str, AnyPath])
    manifest: Manifest | None = None
    dropped: list[str] = field(default_factory=list[str])

    def tensors(self) -> Iterator[tuple[Label, LazyTensor]]:
        """Yield all tensors with labels that do not depend on the format."""
        for index, weights in enumerate(self.models):
            yield from ((("model", index, name), lazy) for name, lazy in weights.items())
        for index, optimizer in enumerate(self.optimizers):
            yield from ((("optimizer", index, *path), lazy) for path, lazy in optimizer.tensors())

    def weights_in(self, state: Mapping[str, Any], where: str) -> dict[str, LazyTensor]:
        """Return the tensors of nested dictionaries by dotted name; other values are dropped."""
        weights: dict[str, LazyTensor] = {}
        for path, value in leaves(state):
            name = ".".join(map(str, path))
            if isinstance(value, LazyTensor):
                weights[name] = value
            else:
                self.dropped.append(f"{where}: {name}, which is no tensor")
        return weights

    def add_files(self, folder: AnyPath, was_read: Callable[[str], bool] = lambda _: False) -> None:
        """Add the other files of a state, and those that describe its model; drop all others.

        Args:
            folder: The folder of the checkpoint.
            was_read: Returns whether a top-level file or folder was read.
        """
        lost: list[str] = []
        for name in sizes_in(folder):
            top = PurePosixPath(name).parts[0]
            is_ours = layout.is_of_checkpoint(top)
            if was_read(top) or top.endswith(INDEX_SUFFIX) or (is_ours and top.startswith(_READ)):
                continue
            if name == top and is_ours:
                self.state_files[name] = folder / name
            elif name == top and top.endswith((".json", ".txt", ".model", ".jinja")):
                self.config_files[name] = folder / name
            else:
                lost.append(name)
        self.dropped += [f"file {some_of(lost)}"] if lost else []

    def add_state(self, folder: AnyPath, was_read: Callable[[str], bool] = lambda _: False) -> None:
        """Add the files and the manifest of a state, and check its files."""
        self.add_files(folder, was_read)
        self.manifest = read_manifest(folder)
        check(folder, self.manifest)


Label = tuple[str | int, ...]
"""Identifies a tensor of a checkpoint, independent of the format."""


def leaves(tree: Any, path: Label = ()) -> Iterator[tuple[Label, Any]]:
    """Yield the leaves of nested dictionaries, lists and tuples, with the keys that lead to each.

    Example:
        >>> list(leaves({"a": [1, {"b": 2}]}))
        [(('a', 0), 1), (('a', 1, 'b'), 2)]
    """
    if not isinstance(tree, (Mapping, list, tuple)):
        yield path, tree
        return
    items: Any = tree.items() if isinstance(tree, Mapping) else enumerate(tree)
    for key, value in items:
        yield from leaves(value, (*path, key))


def name_parameters(
    state: Mapping[str, Any], weights: Mapping[str, LazyTensor], *, in_order: bool = True
) -> OptimizerContents:
    """Return an optimizer's state by name, or by number with the reason.

    An optimizer built with `named_parameters()` has the names. Otherwise a group's parameters are matched to
    all weights of its shapes, in the order of the model; numbers and shapes must fit exactly.

    Args:
        state: A state dict, by number, or by name as FSDP has it.
        weights: The weights of the model.
        in_order: Whether the weights are in the order of the model.
    """
    states, groups = state.get("state", {}), state.get("param_groups", [])
    if all(isinstance(name, str) for group in groups for name in group["params"]):
        return OptimizerContents(states=states, groups=groups)
    names = [list(group.get("param_names", ())) for group in groups]
    if any(len(row) != len(group["params"]) for row, group in zip(names, groups, strict=True)):
        if not in_order:
            reason = "its file numbers the parameters, but the weights file has a different order"
            return OptimizerContents(states=states, groups=groups, unnamed=reason)
        try:
            names = _names_by_shape(states, groups, weights)
        except ValueError as error:
            reason = f"its file numbers the parameters, but {error}"
            return OptimizerContents(states=states, groups=groups, unnamed=reason)
    name_of: dict[Any, str] = {}
    for group, row in zip(groups, names, strict=True):
        name_of |= zip(group["params"], row, strict=True)
    return OptimizerContents(
        states={name_of[number]: values for number, values in states.items() if number in name_of},
        groups=[{**group, "params": row} for group, row in zip(groups, names, strict=True)],
    )


def _names_by_shape(
    states: Mapping[Any, Mapping[str, Any]],
    groups: Sequence[Mapping[str, Any]],
    weights: Mapping[str, LazyTensor],
) -> list[list[str]]:
    names: list[list[str]] = []
    seen: set[tuple[int, ...]] = set()
    for number, group in enumerate(groups):
        shapes: list[tuple[int, ...]] = []
        for parameter in group["params"]:
            values = states.get(parameter, {}).values()
            of_states = {value.shape for value in values if isinstance(value, LazyTensor) and value.shape}
            if len(of_states) != 1:
                raise ValueError("some have no state with a shape")
            shapes += of_states
        fitting = {
            name: lazy
            for name, lazy in weights.items()
            if lazy.shape in shapes and lazy.dtype.is_floating_point
        }
        is_same = [lazy.shape for lazy in fitting.values()] == shapes
        if not seen.isdisjoint(shapes) or not is_same or len({lazy.dtype for lazy in fitting.values()}) > 1:
            raise ValueError(f"those of group {number} do not match the weights in the order of the model")
        seen.update(shapes)
        names.append([*fitting])
    return names


def is_lazy(value: Any) -> bool:
    """Return whether a leaf is a lazy tensor."""
    return isinstance(value, LazyTensor)


def lazy_of(tensor: Tensor) -> LazyTensor:
    """Return a tensor in memory as a lazy one."""
    rows = tensor if tensor.dim() else tensor.view(1)
    return LazyTensor(
        shape=tuple(tensor.shape), dtype=tensor.dtype, read=lambda begin, end: rows[begin:end].clone()
    )
