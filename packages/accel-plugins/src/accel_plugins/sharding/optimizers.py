"""Remap optimizers from a model's original parameters to its sharded ones."""

from __future__ import annotations

import inspect
import warnings
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from traceback import walk_tb
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from accel_plugins.sharding.shards import shard_like
from accel_state.errors import SettingsError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Mapping

    from torch.optim import Optimizer


@dataclass(frozen=True, slots=True)
class _Held:
    optimizer: Optimizer
    parameters: list[Tensor]
    index: int
    name: str
    state: Any


class ParamRemap:
    """Map from original to sharded parameters, for optimizers prepared with the model or later."""

    def __init__(self) -> None:
        self._successors: Any = WeakIdKeyDictionary()
        self._num_originals: Any = WeakIdKeyDictionary()  # of a sharded parameter; several if it is flat
        self._models: WeakSet[nn.Module] = WeakSet()
        self._optimizers: WeakSet[Optimizer] = WeakSet()

    def has(self, model: nn.Module) -> bool:
        """Return whether a model was sharded already."""
        return model in self._models

    def knows(self, optimizer: Optimizer) -> bool:
        """Return whether an optimizer was prepared before."""
        return optimizer in self._optimizers

    def replaces(self, parameter: Tensor) -> bool:
        """Return whether a parameter is an original one that a sharded one has replaced."""
        return parameter in self._successors

    def check(self, optimizers: Iterable[Optimizer], models: Iterable[nn.Module]) -> None:
        """Check that the parameters of optimizers belong to prepared models."""
        owned = {id(one) for model in (*models, *self._models) for one in model.parameters()}
        for optimizer in optimizers:
            everything = [one for group in optimizer.param_groups for one in group["params"]]
            unknown = [one for one in everything if id(one) not in owned and one not in self._successors]
            if unknown:
                raise SettingsError(
                    f"{len(unknown)} of the {len(everything)} parameters of {type(optimizer).__qualname__}, "
                    f"the first of shape {tuple(unknown[0].shape)}, belong to no model that is prepared with "
                    "it or was before: they would not be trained. Create the optimizer from "
                    "model.parameters() of the model that you pass to prepare(), and pass both."
                )

    def add(self, model: nn.Module, before: Iterable[tuple[Tensor, str]], now: Mapping[str, Tensor]) -> None:
        """Add a sharded model: the names of its parameters before, and its parameters now by name."""
        self._models.add(model)
        for parameter, name in before:
            if name in now and now[name] is not parameter and parameter not in self._successors:
                self._successors[parameter] = now[name]
                self._num_originals[now[name]] = self._num_originals.get(now[name], 0) + 1

    def switch(self, optimizer: Optimizer) -> None:
        """Replace an optimizer's original parameters by the sharded ones, and shard its state."""
        every = (one for group in optimizer.param_groups for one in group["params"])
        mapping = {one: self._successors[one] for one in every if one in self._successors}
        for key, count in Counter(id(new) for new in mapping.values()).items():
            total = next(self._num_originals[new] for new in mapping.values() if id(new) == key)
            if count < total:
                raise SettingsError(
                    f"{type(optimizer).__qualname__} has {count} of the {total} parameters of one block, of "
                    "which FSDP1 makes one flat parameter: it would train all of them. Set "
                    "FullyShardedDataParallelPlugin(use_orig_params=True)."
                )
        self._optimizers.add(optimizer)
        switch_parameters(optimizer, mapping)


def hook_of(parameter: Any) -> str | None:
    """Return the method by which a hook on the gradient of a parameter was registered, if one was.

    Example:
        >>> parameter = torch.nn.Parameter(torch.ones(1))
        >>> _ = parameter.register_hook(torch.neg)
        >>> hook_of(parameter)
        'register_hook'
    """
    if parameter._backward_hooks:
        return "register_hook"
    return "register_post_accumulate_grad_hook" if parameter._post_accumulate_grad_hooks else None


def is_elementwise(optimizer: Optimizer) -> bool:
    """Return whether an optimizer computes the same from shards of a parameter as from all of it.

    A new optimizer of its class and options steps a small matrix, and others the flat halves of it; they
    differ where the update of an element depends on others, as by an inner product, a norm, a factored state
    or a matrix. An optimizer that cannot be made from its defaults, or draws random numbers, is trusted.

    Example:
        >>> parameters = [torch.nn.Parameter(torch.ones(2, 2))]
        >>> is_elementwise(torch.optim.AdamW(parameters)), is_elementwise(torch.optim.LBFGS(parameters))
        (True, False)
    """
    generator = torch.Generator().manual_seed(0)
    value, *gradients = torch.randn(3, 4, 4, generator=generator).unbind()
    try:
        full, again = (_stepped(optimizer, value, gradients, seed=seed) for seed in (0, 1))
    except Exception:  # noqa: BLE001 - it is the code of whoever wrote the optimizer
        return True
    if not torch.equal(full, again):
        return True
    try:
        halves = [
            _stepped(optimizer, value.flatten()[part], [one.flatten()[part] for one in gradients], seed=0)
            for part in (slice(8), slice(8, 16))
        ]
    except Exception:  # noqa: BLE001 - as above
        return False
    return torch.allclose(torch.cat(halves, 1), full.flatten(1), rtol=1e-3, atol=1e-6)


def _stepped(optimizer: Optimizer, value: Tensor, gradients: Iterable[Tensor], *, seed: int) -> Tensor:
    """Step a new optimizer of the same class, with a parameter of this value in each group."""
    kind: Any = type(optimizer)
    accepted = inspect.signature(kind).parameters
    options = {name: default for name, default in optimizer.defaults.items() if name in accepted}
    parameters = [nn.Parameter(value.clone()) for _ in optimizer.param_groups]
    groups = [
        {**group, "params": [parameter]}
        for group, parameter in zip(optimizer.param_groups, parameters, strict=True)
    ]
    with torch.random.fork_rng(devices=()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)
        trial = kind(groups, **options)
        for gradient in gradients:

            @torch.enable_grad()
            def closure(gradient: Tensor = gradient) -> Tensor:
                loss = torch.zeros(())
                for parameter in parameters:
                    parameter.grad = gradient.clone()
                    loss = loss + (parameter.detach() * gradient).sum()
                return loss

            closure()
            trial.step(closure)
    return torch.stack([one.detach() for one in parameters])


def detach_params(optimizers: Iterable[Optimizer], names: Mapping[int, str]) -> list[_Held]:
    """Remove a model's parameters, by id, from optimizers, so that their memory can be freed.

    The optimizers must not be used until `reattach_params`.
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
    """Put a model's sharded parameters in place of the detached ones, with their sharded states."""
    now = dict(model.named_parameters(remove_duplicate=False))
    for one in held:
        new = now[one.name]
        one.parameters[one.index] = new
        if one.state is not None:
            one.optimizer.state[new] = _shard_state(one.state, new)


def switch_parameters(optimizer: Optimizer, mapping: Mapping[Tensor, Tensor]) -> None:
    """Replace parameters of an optimizer, in place, by those that a mapping has for them.

    Groups keep their lists; state is sharded like the new parameters. One parameter may replace several.
    """
    by_id = {id(old): new for old, new in mapping.items()}
    owner: dict[int, int] = {}
    for index, group in enumerate(optimizer.param_groups):
        parameters = {id(one): one for one in (by_id.get(id(old), old) for old in group["params"])}
        for old in group["params"]:
            new = by_id.get(id(old))
            if new is not None and old in optimizer.state:
                optimizer.state[new] = _shard_state(optimizer.state.pop(old), new)
        for key in parameters:
            if owner.setdefault(key, index) != index:
                raise SettingsError(
                    f"The parameters of one block are in the groups {owner[key]} and {index} of "
                    f"{type(optimizer).__qualname__}, but FSDP1 makes one flat parameter of them; set "
                    "FullyShardedDataParallelPlugin(use_orig_params=True)."
                )
        group["params"][:] = parameters.values()


@contextmanager
def one_mesh_per_group(optimizer: Optimizer) -> Generator[None]:
    """Split an optimizer's groups by mesh within the block, for its step.

    torch's `foreach` and `fused` kernels take lists of tensors only if all are on one mesh, or on none. The
    groups are restored afterwards, with the values that the step wrote.

    Raises:
        UnsupportedError: The step uses an operation that torch does not have for DTensors.
    """
    groups = [*optimizer.param_groups]
    split = [_by_mesh(group) for group in groups]
    # LBFGS keeps a list of its own, and accepts one group only.
    is_split = any(len(by_mesh) > 1 for by_mesh in split) and "_params" not in vars(optimizer)
    if is_split:  # in place: an optimizer that wraps another one has the same list
        optimizer.param_groups[:] = [group for by_mesh in split for group in by_mesh]
    try:
        yield
    except (NotImplementedError, RuntimeError) as error:
        if not _is_raised_by_dtensor(error):
            raise
        raise UnsupportedError(
            f"{type(optimizer).__qualname__} cannot step on sharded parameters: {str(error).splitlines()[0]} "
            "Use an optimizer that works on DTensors, or a strategy that does not shard."
        ) from error
    finally:
        if is_split:
            optimizer.param_groups[:] = groups
            for group, by_mesh in zip(groups, split, strict=True):
                group.update({**by_mesh[0], "params": group["params"]} if by_mesh else {})


def _is_raised_by_dtensor(error: BaseException) -> bool:
    if "DTensor" in str(error):
        return True
    *_, (frame, _) = walk_tb(error.__traceback__)
    return frame.f_globals["__name__"].startswith("torch.distributed.tensor.")


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
        name: shard_like(value.to(like.dtype) if value.is_floating_point() else value, like)
        if isinstance(value, Tensor) and value.shape == like.shape and not isinstance(value, DTensor)
        else value
        for name, value in items.items()
    }
