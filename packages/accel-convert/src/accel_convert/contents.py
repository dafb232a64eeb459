"""Contents of a checkpoint of any format, as returned by readers and passed to writers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from typing import Any

from accel_ops.weights.lazy_tensors import LazyTensor
from accel_state.frozen import frozen
from accel_state.remote import AnyPath
from accel_train.checkpoint.layout import Manifest


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


@frozen
class CheckpointContents:
    """The contents of a checkpoint; tensors are read lazily.

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
    models: Sequence[Mapping[str, LazyTensor]]
    optimizers: Sequence[OptimizerContents] = ()
    state_files: Mapping[str, AnyPath] = field(default_factory=dict[str, AnyPath])
    config_files: Mapping[str, AnyPath] = field(default_factory=dict[str, AnyPath])
    manifest: Manifest | None = None
    dropped: Sequence[str] = ()

    def tensors(self) -> Iterator[tuple[Label, LazyTensor]]:
        """Yield all tensors with labels that do not depend on the format."""
        for index, weights in enumerate(self.models):
            yield from ((("model", index, name), lazy) for name, lazy in weights.items())
        for index, optimizer in enumerate(self.optimizers):
            yield from ((("optimizer", index, *path), lazy) for path, lazy in optimizer.tensors())


def weights_in(state: Mapping[str, Any], where: str, dropped: list[str]) -> dict[str, LazyTensor]:
    """Return the tensors of nested dictionaries by dotted name; record other values in `dropped`."""
    weights: dict[str, LazyTensor] = {}
    for path, value in leaves(state):
        name = ".".join(map(str, path))
        if isinstance(value, LazyTensor):
            weights[name] = value
        else:
            dropped.append(f"{where}: {name}, which is no tensor")
    return weights


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
