"""States of full models, which every rank has; offloaded weights, and checks of models to prepare."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from accel_ops.modules import extract_model_from_parallel, without_compiler
from accel_ops.tree import recursively_apply
from accel_ops.weights.mapped import release
from accel_plugins.full_parameters import (
    FullParameters,
    ParameterSource,
    iter_gathered,
    named_parameters_of,
)
from accel_state.errors import CheckpointError, SettingsError, UnsupportedError

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from accel_plugins.sharding.state import StateAllocator, StateForm
    from accel_plugins.strategy import Bundle, StateDict

Write: TypeAlias = "Callable[[Any, Path], object]"
"""Writes a state to a file."""


def check_materialised(bundle: Bundle) -> None:
    """Refuse models with parameters that are not materialised, unless a hook loads them for each forward."""
    for model in bundle.models:
        check_not_lazy(model)
        for name, parameter in model.named_parameters():
            if parameter.is_meta and not _is_offloaded(model, name):
                raise SettingsError(
                    f"{type(model).__name__}: the parameter {name!r} is on the meta device. Load the "
                    "weights before prepare()."
                )


def has_device_map(model: nn.Module) -> bool:
    """Return whether a device map spreads a model, or a part of it, over several devices."""
    return any(len(getattr(part, "hf_device_map", ())) > 1 for part in model.modules())


def has_offloaded_parameters(model: nn.Module) -> bool:
    """Return whether hooks load parameters of a model from the host or the disk for each forward."""
    return any(
        parameter.is_meta and _is_offloaded(model, name) for name, parameter in model.named_parameters()
    )


def with_offloaded_weights(state: StateDict, model: nn.Module) -> StateDict:
    """Replace the meta tensors of a state dict by the offloaded weights, in place, and return it.

    Raises:
        CheckpointError: A tensor is on the meta device, and no hook stores its values.
    """
    core = _core(model)
    for name, value in state.items():
        if isinstance(value, Tensor) and value.is_meta:
            state[name] = _offloaded_weight(core, name)
    return state


def _offloaded_weight(model: nn.Module, name: str) -> Tensor:
    """Return a weight from the hook that offloads it."""
    for weights, path in _offloading_hooks(model, name):
        try:
            return weights[path].detach()
        except KeyError:
            continue
    raise CheckpointError(
        f"{name!r} of {type(model).__name__} is on the meta device, and no hook stores its values. "
        "Load weights before saving the model."
    )


def _is_offloaded(model: nn.Module, name: str) -> bool:
    return next(_offloading_hooks(model, name), None) is not None


def _offloading_hooks(model: nn.Module, name: str) -> Iterator[tuple[Mapping[str, Tensor], str]]:
    """Yield the weights of each hook that offloads a module around a parameter, and its name there."""
    module, path = model, name
    while path:
        hook: Any = vars(module).get("_hf_hook")  # the name that all libraries use
        for link in getattr(hook, "hooks", (hook,)):
            weights = getattr(link, "weights_map", None)
            if weights is not None:
                yield weights, path
        child, _, path = path.partition(".")
        if path:
            module = module.get_submodule(child)


def check_not_lazy(model: nn.Module) -> None:
    """Refuse a model with lazy parameters, which have no shape."""
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise SettingsError(
                f"{type(model).__name__}: the parameter {name!r} of a lazy module has no shape yet. Run "
                "one batch through the model before prepare()."
            )


def move_to_device(bundle: Bundle, device: torch.device) -> list[nn.Module]:
    """Move models to the device, in order, except those that hooks run across devices.

    A model whose placement the caller has forbidden is not moved either. Parameters stay the same objects, so
    that optimizers keep pointing at them.
    """
    models = [*bundle.models]
    for index, model in enumerate(models):
        may_move = not bundle.placements or bundle.placements[index]
        if may_move and not (has_device_map(model) or has_offloaded_parameters(model)):
            models[index] = model.to(device)
    return models


class States:
    """Reads and loads the states of models and optimizers. Every method is called on every rank.

    This class serves strategies whose ranks have full, ordinary tensors. Where ranks have shards,
    `is_sharded` is true, and `accel_plugins.sharding.shards.ShardedStates` gathers full states from them.

    A sharded state dict has a `DTensor` for each sharded tensor; any other tensor is replicated. Names have
    no prefixes of wrappers, so that strategies load each other's checkpoints.

    Attributes:
        is_sharded: Whether ranks have shards, so that full states take collectives.
        writer: The rank that writes values in sharded state dicts that are not sharded.
    """

    is_sharded: ClassVar[bool] = False
    writer: int = 0
    _device = torch.device("cpu")  # on which shards are gathered

    def full_state_dict(self, model: nn.Module, *, keep: bool = True) -> StateDict:
        """Return the full state dict under the unwrapped model's names; on the CPU if models are sharded.

        Args:
            model: Prepared or not.
            keep: Whether this rank needs it. Otherwise it takes part in the collectives, and the result may
                be empty.
        """
        del keep
        return with_offloaded_weights(_core(model).state_dict(), model)

    def iter_full_state_dict(self, model: nn.Module, *, keep: bool = True) -> Iterator[StateDict]:
        """Yield the full state dict in dictionaries that share no memory.

        If models are sharded, each is gathered when it is requested, so that no rank needs memory for the
        full state dict: every rank iterates over all.
        """
        yield self.full_state_dict(model, keep=keep)

    def iter_full_parameters(self, model: nn.Module, request: FullParameters) -> Iterator[tuple[str, Tensor]]:
        """Yield names of the unwrapped model and full parameters, bit-identical to `full_state_dict`.

        Every rank iterates over all, in the same order; a rank that keeps nothing gets nothing.

        Args:
            model: Prepared or not.
            request: Their dtype, the size of buckets, and the ranks that need them.
        """
        return iter_gathered(self.sources(model), request, self._device)

    def sources(self, model: nn.Module) -> Sequence[ParameterSource]:
        """Return a model's parameters as this rank has them, in the order of `iter_full_parameters`.

        Raises:
            UnsupportedError: They belong to an engine that has them in another form.
        """
        return [
            ParameterSource(names=names, shape=value.shape, dtype=value.dtype, full=value.detach())
            for names, value in named_parameters_of(_core(model).state_dict(keep_vars=True))
        ]

    def load_full_state_dict(self, model: nn.Module, state: Mapping[str, Any], **options: Any) -> Any:
        """Load a full state dict, which every rank has, into the wrapped model.

        Args:
            model: Prepared or not.
            state: Name to tensor; tensors may be read from a file when they are needed.
            **options: Options of `Module.load_state_dict`, whose result is returned.
        """
        core = _core(model)
        state = _check_offloaded_values(core, state)

        def release_own(prefix: str, module: nn.Module, _: Any) -> None:
            own = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
            for name, _ in own:
                release(state.get(f"{prefix}.{name}" if prefix else name))

        # Mapped tensors are released as soon as their module has loaded them.
        handles = [
            module.register_load_state_dict_post_hook(partial(release_own, prefix))
            for prefix, module in core.named_modules()
        ]
        try:
            return core.load_state_dict(state, **options)
        finally:
            for handle in handles:
                handle.remove()

    def full_optimizer_state(
        self, optimizer: Optimizer, models: Sequence[nn.Module], *, keep: bool = True
    ) -> StateDict:
        """Return the state dict that the optimizer would have in a run of one process.

        Args:
            optimizer: Prepared, without any wrapper of ours.
            models: All prepared models, of which some own its parameters.
            keep: As in `full_state_dict`.
        """
        del models, keep
        return optimizer.state_dict()

    def load_full_optimizer_state(
        self, optimizer: Optimizer, models: Sequence[nn.Module], state: Mapping[str, Any]
    ) -> None:
        """Load a full optimizer state dict, which every rank has."""
        del models
        load_in_place(optimizer, state)

    def form(self) -> StateForm:
        """Return the form that `save_state` writes; only called where ranks have shards, as all below."""
        raise NotImplementedError

    def model_tensors(self, model: nn.Module) -> StateDict:
        """Return the sharded state dict of a prepared model, with `ABSENT` for tensors of other ranks.

        Its tensors may be read until the model changes, and written before `load_model`.
        """
        raise NotImplementedError

    def load_model(self, model: nn.Module, state: StateDict, **options: Any) -> Any:
        """Load a state dict in the layout of `model_tensors`."""
        raise NotImplementedError

    def optimizer_tensors(self, optimizer: Optimizer, models: Sequence[nn.Module]) -> StateDict:
        """Return the sharded state dict of an optimizer, with parameters by name.

        Args:
            optimizer: Prepared, without the wrapper `AcceleratedOptimizer`.
            models: All prepared models, some of which own its parameters.

        Returns:
            `{"state": {name: {key: value}}, "param_groups": [{…, "params": [name, …]}]}`; without the states
            of other ranks, and with `ABSENT` for groups that other ranks write.
        """
        raise NotImplementedError

    def state_allocator(self, optimizer: Optimizer, models: Sequence[nn.Module]) -> StateAllocator:
        """Return an allocator for the destination tensors of an optimizer load.

        Returns:
            A function of the names of a parameter and of its state, and of the shape and dtype of the full
            saved tensor; it may return a tensor of the optimizer's current state, or `ABSENT` for a
            parameter of other ranks.
        """
        raise NotImplementedError

    def load_optimizer(self, optimizer: Optimizer, models: Sequence[nn.Module], state: StateDict) -> None:
        """Load a state dict in the layout of `optimizer_tensors`, with the groups of all parameters.

        Raises:
            CheckpointError: Its parameters differ from the optimizer's.
        """
        raise NotImplementedError

    def save_native(
        self, model: nn.Module, directory: Path, index: int, *, write: Write = torch.save
    ) -> None:
        """Write the engine's own files of the model prepared as number `index`, and of its optimizer.

        Called where `form()` is `NATIVE`; the files are complete after the next barrier.

        Args:
            model: Prepared.
            directory: Exists already.
            index: The number with which it was prepared.
            write: Called as `write(state, path)` for each file. It may write later, while the model stays as
                it is.
        """
        raise NotImplementedError

    def load_native(self, model: nn.Module, directory: Path, index: int) -> None:
        """Load the files of `save_native` into the wrapped model and its optimizer."""
        raise NotImplementedError


def _check_offloaded_values(core: nn.Module, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Leave out offloaded weights, which loading cannot change; raise if their values differ."""
    offloaded = {
        name: tensor
        for name, tensor in core.state_dict().items()
        if isinstance(tensor, Tensor) and tensor.is_meta and name in state and _is_offloaded(core, name)
    }
    for name in offloaded:
        weight = _offloaded_weight(core, name)
        if not torch.equal(weight.cpu(), state[name].to("cpu", weight.dtype)):
            raise CheckpointError(
                f"{name!r} of {type(core).__name__} is offloaded, and the state to load has other values "
                "for it. Load these weights by load_checkpoint_and_dispatch, which offloads them."
            )
        release(state[name])
    return {**state, **offloaded} if offloaded else state


def load_in_place(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Load an optimizer's state dict in place: copy tensor by tensor into its existing state tensors.

    Where there are none, as before the first step, memory is allocated. No reference to `state` is kept, and
    mapped tensors are released as soon as they are copied.

    Args:
        optimizer: An optimizer of ordinary tensors.
        state: As returned by `Optimizer.state_dict`.
    """
    saved = [group["params"] for group in state["param_groups"]]
    current = [group["params"] for group in optimizer.param_groups]
    if [*map(len, saved)] != [*map(len, current)]:
        optimizer.load_state_dict(dict(state))  # raises
        return
    parameters = dict(zip(chain.from_iterable(saved), chain.from_iterable(current), strict=True))
    copies: dict[int, Any] = {}  # by the id of the value: shared objects stay shared
    copied: dict[Any, dict[str, Any]] = {}
    for index, values in state["state"].items():
        parameter = parameters[index]
        own = optimizer.state.get(parameter, {})
        for key, value in values.items():
            if id(value) not in copies:
                copies[id(value)] = _copy_to(value, own.get(key), parameter)
            copied.setdefault(index, {})[key] = copies[id(value)]
    optimizer.load_state_dict({**state, "state": copied})


@torch.no_grad()
def _copy_to(value: Any, target: Any, parameter: Tensor) -> Any:
    """Copy an optimizer state value into the target tensor if the shapes are equal, else into new memory."""
    if type(value) is not Tensor:
        return recursively_apply(lambda tensor: tensor.clone(), value)
    if type(target) is Tensor and target.shape == value.shape and target.dtype == value.dtype:
        copy = target.detach().copy_(value)
    else:
        copy = value.to(parameter.device if value.shape == parameter.shape else value.device, copy=True)
    release(value)
    return copy


def _core(model: nn.Module) -> nn.Module:
    return extract_model_from_parallel(model, keep_torch_compile=False)


@contextmanager
def sync_in_backward(model: nn.Module) -> Generator[None]:
    """Synchronise gradients in the backward pass within, although the forward pass ran in `no_sync`."""
    inner = without_compiler(model)
    if isinstance(inner, DistributedDataParallel):
        if inner.find_unused_parameters:
            raise UnsupportedError(
                "trigger_sync_in_backward() with find_unused_parameters=True, which needs a forward pass "
                "that synchronises. Remove the option, or run the last forward pass outside no_sync()."
            )
        before = inner.require_backward_grad_sync, inner.require_forward_param_sync
        inner.require_backward_grad_sync = inner.require_forward_param_sync = True
        # The forward pass prepares the reducer only outside of `no_sync`:
        # https://docs.pytorch.org/docs/stable/notes/ddp.html
        inner.reducer.prepare_for_backward([])
        try:
            yield
        finally:
            inner.require_backward_grad_sync, inner.require_forward_param_sync = before
        return
    fsdp = sys.modules.get("torch.distributed.fsdp")  # imported already if FSDP2 shards the model
    if fsdp is not None and isinstance(inner, fsdp.FSDPModule):
        sharded: Any = inner
        sharded.set_requires_gradient_sync(True)
    yield
