"""Contents of a checkpoint of any format, as returned by readers and passed to writers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field
from pathlib import PurePosixPath
from typing import Any

from torch import Tensor

from accel_ops.weights.layout import INDEX_SUFFIX, MODEL_NAME
from accel_ops.weights.lazy_tensors import LazyTensor
from accel_state.errors import some_of
from accel_state.frozen import frozen
from accel_state.remote import AnyPath
from accel_train.checkpoint import layout
from accel_train.checkpoint.files import sizes_in
from accel_train.checkpoint.folder import check, read_manifest
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


def is_lazy(value: Any) -> bool:
    """Return whether a leaf is a lazy tensor."""
    return isinstance(value, LazyTensor)


def lazy_of(tensor: Tensor) -> LazyTensor:
    """Return a tensor in memory as a lazy one."""
    rows = tensor if tensor.dim() else tensor.view(1)
    return LazyTensor(
        shape=tuple(tensor.shape), dtype=tensor.dtype, read=lambda begin, end: rows[begin:end].clone()
    )


def of_state(
    folder: AnyPath,
    form: str,
    models: list[dict[str, LazyTensor]],
    optimizers: list[OptimizerContents],
    dropped: list[str],
    read: Callable[[str], bool] = lambda _: False,
) -> CheckpointContents:
    """Return the contents of a state, with the files beside its models and optimizers.

    `read` returns whether a top-level file or folder was read.
    """
    files, described, lost = other_files(folder, read)
    manifest = read_manifest(folder)
    check(folder, manifest)
    return CheckpointContents(
        form=form,
        models=models,
        optimizers=optimizers,
        state_files=files,
        config_files=described,
        manifest=manifest,
        dropped=[*dropped, *lost],
    )


_READ = re.compile(
    rf"""(({layout.FSDP_MODEL_NAME}|{layout.OPTIMIZER_NAME})_\d+(/.*)?
    |({MODEL_NAME}|{layout.FSDP_MODEL_NAME}|{layout.OPTIMIZER_NAME})(_\d+)?\.bin
    |model(_\d+)?\.safetensors
    |(model|pytorch_model)-\d+-of-\d+\.(safetensors|bin)
    |.*{re.escape(INDEX_SUFFIX)}
    |{re.escape(layout.MANIFEST_NAME)})""",
    re.VERBOSE,
)
_DESCRIPTIONS = (".json", ".txt", ".model", ".jinja")


def other_files(
    folder: AnyPath, read: Callable[[str], bool]
) -> tuple[dict[str, AnyPath], dict[str, AnyPath], list[str]]:
    """Return the files of a state, the files that describe a model, and a phrase about the others."""
    state_files: dict[str, AnyPath] = {}
    described: dict[str, AnyPath] = {}
    lost: list[str] = []
    for name in sizes_in(folder):
        top = PurePosixPath(name).parts[0]
        if _READ.fullmatch(name) or read(top):
            continue
        if name != top:
            lost.append(name)
        elif layout.is_of_checkpoint(name):
            state_files[name] = folder / name
        elif top.endswith(_DESCRIPTIONS):
            described[name] = folder / name
        else:
            lost.append(name)
    return state_files, described, [f"file {some_of(lost)}"] if lost else []
