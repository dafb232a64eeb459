"""Optimizers that were made for the parameters that a model had before it was divided."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from accel_plugins.sharding.shards import part_like
from accel_state.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Mapping

    from torch.optim import Optimizer


@dataclass(frozen=True, slots=True)
class _Held:
    optimizer: Optimizer
    parameters: list[Tensor]
    index: int
    name: str
    state: Any


class ShardRemap:
    """Knows which parameter has taken the place of which, also for optimizers that are prepared later."""

    def __init__(self) -> None:
        self._successors: Any = WeakIdKeyDictionary()
        self._models: WeakSet[nn.Module] = WeakSet()

    def has(self, model: nn.Module) -> bool:
        """Whether a model was divided already."""
        return model in self._models

    def check(self, optimizers: Iterable[Optimizer], models: Iterable[nn.Module]) -> None:
        """Refuse optimizers of parameters that are in no model.

        Args:
            optimizers: That are about to be prepared.
            models: That are about to be prepared with them.

        Raises:
            SettingsError: One has such a parameter.
        """
        owned = {id(one) for model in (*models, *self._models) for one in model.parameters()}
        for optimizer in optimizers:
            check_params_belong_to(optimizer, lambda one: id(one) in owned or one in self._successors)

    def add(self, model: nn.Module, before: Any) -> None:
        """Remember a model that was divided.

        Args:
            model: With its new parameters.
            before: Weakly, every parameter that it had, to its name.
        """
        self._models.add(model)
        now = dict(model.named_parameters(remove_duplicate=False))
        for parameter, name in before.items():
            self._successors[parameter] = now[name]

    def switch(self, optimizer: Optimizer) -> None:
        """Let an optimizer go on with the parameters that took the place of its own; its state goes along."""
        mapping = {
            parameter: self._successors[parameter]
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter in self._successors
        }
        if mapping:
            switch_parameters(optimizer, mapping)


def detach_params(optimizers: Iterable[Optimizer], names: Mapping[int, str]) -> list[_Held]:
    """Take the parameters of a model out of optimizers, so that their memory can be used for other things.

    Args:
        optimizers: Are not to be used until `reattach_params`.
        names: Id to name of the model's parameters.
    """
    held: list[_Held] = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            parameters = group["params"]
            for index, parameter in enumerate(parameters):
                name = names.get(id(parameter))
                if name is not None:
                    held.append(
                        _Held(optimizer, parameters, index, name, optimizer.state.pop(parameter, None))
                    )
                    parameters[index] = torch.empty(0)
    return held


def reattach_params(held: Iterable[_Held], model: nn.Module) -> None:
    """Put the parameters that a model has now in place of those that were let go, with their states."""
    now = dict(model.named_parameters(remove_duplicate=False))
    for one in held:
        new = now[one.name]
        one.parameters[one.index] = new
        if one.state is not None:
            one.optimizer.state[new] = _shard_state(one.state, new)


def switch_parameters(optimizer: Optimizer, mapping: Mapping[Tensor, Tensor]) -> None:
    """Replace parameters of an optimizer, in place.

    Args:
        optimizer: Its groups keep their lists, its state is divided as the new parameters are.
        mapping: A parameter to the one that takes its place; others stay.
    """
    by_id = {id(old): new for old, new in mapping.items()}
    for group in optimizer.param_groups:
        parameters = group["params"]
        for index, parameter in enumerate(parameters):
            new = by_id.get(id(parameter))
            if new is None:
                continue
            parameters[index] = new
            if parameter in optimizer.state:
                optimizer.state[new] = _shard_state(optimizer.state.pop(parameter), new)


@contextmanager
def one_mesh_per_group(optimizer: Optimizer) -> Generator[None]:
    """Split the groups of an optimizer by mesh within the block, for its step.

    torch computes with lists of tensors (`foreach`, `fused`) only where all are on one mesh, or on none.

    Args:
        optimizer: Has its own groups again afterwards, with what the step has written into them.
    """
    groups = [*optimizer.param_groups]
    split = [_by_mesh(group) for group in groups]
    if all(len(parts) <= 1 for parts in split):
        yield
        return
    # In place: an optimizer around another one has the same list.
    optimizer.param_groups[:] = [part for parts in split for part in parts]
    try:
        yield
    finally:
        optimizer.param_groups[:] = groups
        for group, parts in zip(groups, split, strict=True):
            group.update({**parts[0], "params": group["params"]} if parts else {})


def _by_mesh(group: dict[str, Any]) -> list[dict[str, Any]]:
    meshes: dict[Any, list[Tensor]] = {}
    for one in group["params"]:
        meshes.setdefault(one.device_mesh if isinstance(one, DTensor) else None, []).append(one)
    return [{**group, "params": parameters} for parameters in meshes.values()]


def _shard_state(state: Any, like: Tensor) -> Any:
    if not isinstance(state, dict):
        return state
    items: dict[str, Any] = state
    return {
        name: part_like(value.to(like.dtype) if value.is_floating_point() else value, like)
        if isinstance(value, Tensor) and value.shape == like.shape and not isinstance(value, DTensor)
        else value
        for name, value in items.items()
    }


def check_params_belong_to(optimizer: Optimizer, is_known: Callable[[Tensor], bool]) -> None:
    """Refuse an optimizer with parameters of no model.

    Args:
        optimizer: About to be prepared.
        is_known: Whether a parameter is one of a model that is prepared with it or was before.

    Raises:
        SettingsError: It has such a parameter.
    """
    everything = [one for group in optimizer.param_groups for one in group["params"]]
    strange = [one for one in everything if not is_known(one)]
    if strange:
        raise SettingsError(
            f"{type(optimizer).__qualname__} has {len(strange)} of {len(everything)} parameters, the first "
            f"of shape {tuple(strange[0].shape)}, that belong to no model that is prepared with it or was "
            "before: they would not be trained. Make the optimizer of model.parameters() of that very model, "
            "and pass both to prepare()."
        )
