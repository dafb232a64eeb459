"""The strategy of a single process, and common code of strategies with full models on every rank."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import field, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from accel_ops.modules import extract_model_from_parallel, without_compiler
from accel_ops.tree import recursively_apply
from accel_ops.weights.mapped import release
from accel_plugins.full_parameters import FullParameters, full_sources, iter_gathered
from accel_plugins.parallelism.config import check_axes
from accel_plugins.strategy import (
    PLAIN_FEATURES,
    BatchSharding,
    Bundle,
    Optimizers,
    Parameters,
    PrecisionPolicy,
    StateDict,
    Strategy,
)
from accel_state.errors import CheckpointError, SettingsError, UnsupportedError
from accel_state.frozen import frozen
from accel_state.runtime import Runtime
from accel_state.settings.model import Settings

if TYPE_CHECKING:
    from torch.optim import Optimizer


def build(
    settings: Settings, runtime: Runtime, precision: PrecisionPolicy, handlers: Mapping[type, Any]
) -> Strategy:
    """Build the strategy of a run with one process; `settings` and `handlers` have no effect on it."""
    del settings
    check_axes(handlers, 1)
    return Strategy(
        name="single",
        wrapper=SingleWrapper(device=runtime.device),
        stepper=TorchStepper(precision=precision),
        persister=ReplicatedPersister(),
        sharding=BatchSharding(num_shards=1, shard_index=0),
        features=PLAIN_FEATURES,
    )


@frozen
class SingleWrapper:
    """Model wrapper that moves models to the device."""

    device: torch.device

    def check(self, bundle: Bundle) -> None:
        check_materialised(bundle)

    def wrap(self, bundle: Bundle, *, evaluation: bool = False) -> Bundle:
        del evaluation
        return replace(bundle, models=move_to_device(bundle, self.device))

    def unwrap(self, model: nn.Module) -> nn.Module:
        return model


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
    return any(True for _ in _offloading_hooks(model, name))


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
    return [
        model.to(device)
        if bundle.may_move(index) and not (has_device_map(model) or has_offloaded_parameters(model))
        else model
        for index, model in enumerate(bundle.models)
    ]


class ReplicatedPersister:
    """Persister of replicated models."""

    __slots__ = ()

    def full_state_dict(self, model: nn.Module, *, keep: bool = True) -> StateDict:
        del keep
        return with_offloaded_weights(_core(model).state_dict(), model)

    def iter_full_state_dict(self, model: nn.Module, *, keep: bool = True) -> Iterator[StateDict]:
        yield self.full_state_dict(model, keep=keep)

    def iter_full_parameters(self, model: nn.Module, request: FullParameters) -> Iterator[tuple[str, Tensor]]:
        return iter_gathered(full_sources(_core(model).state_dict(keep_vars=True)), request)

    def load_full_state_dict(self, model: nn.Module, state: Mapping[str, Any], **options: Any) -> Any:
        core = _core(model)
        state = _check_offloaded_values(core, state)
        with _releasing(core, state):
            return core.load_state_dict(state, **options)

    def full_optimizer_state(
        self, optimizer: Optimizer, models: Sequence[nn.Module], *, keep: bool = True
    ) -> StateDict:
        del models, keep
        return optimizer.state_dict()

    def load_full_optimizer_state(
        self, optimizer: Optimizer, models: Sequence[nn.Module], state: Mapping[str, Any]
    ) -> None:
        del models
        load_in_place(optimizer, state)


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


@contextmanager
def _releasing(core: nn.Module, state: Mapping[str, Any]) -> Generator[None]:
    """Release mapped tensors of a state dict as soon as their module has loaded them, within the block."""

    def after_load(prefix: str, module: nn.Module, _: Any) -> None:
        own = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
        for name, _ in own:
            release(state.get(f"{prefix}.{name}" if prefix else name))

    handles = [
        module.register_load_state_dict_post_hook(partial(after_load, prefix))
        for prefix, module in core.named_modules()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


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


@frozen
class TorchStepper:
    """Stepper for PyTorch's optimizers; by default, for ordinary tensors.

    Args:
        no_sync_of: Returns the context in which a model's gradients stay local.
        join_of: Returns the context in which ranks may finish early, from the joinables and
            `divide_by_initial_world_size`.
        around_backward: Returns a context for the duration of every backward pass.
        around_step: Returns a context for the duration of every step of an optimizer.
        clip_norm: Clips unscaled gradients; called as `clip_norm(parameters, max_norm, norm_type)`.
        clip_value: Likewise, as `clip_value(parameters, clip_value)`.
    """

    precision: PrecisionPolicy
    no_sync_of: Callable[[nn.Module], AbstractContextManager[None]] | None = None
    join_of: Callable[[Sequence[Any], bool], AbstractContextManager[None]] | None = None
    around_backward: Callable[[], AbstractContextManager[None]] | None = None
    around_step: Callable[[Optimizer], AbstractContextManager[None]] | None = None
    clip_norm: Callable[..., Tensor] = clip_grad_norm_
    clip_value: Callable[..., None] = clip_grad_value_
    step: Callable[..., bool | Tensor] = field(init=False, repr=False, compare=False)
    """Steps an optimizer: if possible the precision policy's method itself, without a call in between."""

    def __post_init__(self) -> None:
        around, step = self.around_step, self.precision.step
        if around is not None:

            def step_within(optimizer: Optimizer, closure: Any = None) -> bool | Tensor:
                with around(optimizer):
                    return self.precision.step(optimizer, closure)

            step = step_within
        object.__setattr__(self, "step", step)

    def backward(self, loss: Tensor, *, accumulation: int, sync: bool, **kwargs: Any) -> None:
        del sync  # `no_sync` around the forward pass decides
        if accumulation != 1:
            loss = loss / accumulation
        if self.precision.scaler is not None:
            loss = self.precision.scale(loss)
        if self.around_backward is None:
            loss.backward(**kwargs)
        else:
            with self.around_backward():
                loss.backward(**kwargs)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        return nullcontext() if self.no_sync_of is None else self.no_sync_of(model)

    def join(
        self, joinables: Sequence[Any], *, divide_by_initial_world_size: bool = True
    ) -> AbstractContextManager[None]:
        return (
            nullcontext() if self.join_of is None else self.join_of(joinables, divide_by_initial_world_size)
        )

    def clip_grad_norm(
        self, parameters: Parameters, max_norm: float, norm_type: float = 2.0, *, optimizers: Optimizers = ()
    ) -> Tensor:
        return self.clip_norm(unscale_gradients(self.precision, parameters, optimizers), max_norm, norm_type)

    def clip_grad_value(
        self, parameters: Parameters, clip_value: float, *, optimizers: Optimizers = ()
    ) -> None:
        parameters = unscale_gradients(self.precision, parameters, optimizers)
        tensors = [parameters] if isinstance(parameters, torch.Tensor) else parameters
        # torch's function needs a gradient, and a rank may have none where its shards are empty.
        if any(parameter.grad is not None for parameter in tensors):
            self.clip_value(tensors, clip_value)


def unscale_gradients(
    precision: PrecisionPolicy, parameters: Parameters, optimizers: Optimizers
) -> Tensor | list[Tensor]:
    """Unscale the gradients of the optimizers that own any of the parameters; return the parameters."""
    clipped = parameters if isinstance(parameters, torch.Tensor) else [*parameters]
    if precision.scaler is not None:
        ids = {id(tensor) for tensor in ([clipped] if isinstance(clipped, torch.Tensor) else clipped)}
        precision.unscale(
            optimizer
            for optimizer in optimizers
            if any(id(p) in ids for group in optimizer.param_groups for p in group["params"])
        )
    return clipped


@contextmanager
def sync_in_backward(model: nn.Module) -> Generator[None]:
    """Synchronise gradients in the backward pass within, although the forward pass ran in `no_sync`."""
    inner = without_compiler(model)
    if isinstance(inner, DistributedDataParallel):
        if inner.find_unused_parameters:
            raise UnsupportedError(
                "trigger_sync_in_backward() with find_unused_parameters=True: unused parameters are "
                "detected in a forward pass that synchronises. Remove the option, or run the last "
                "forward pass outside no_sync()."
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
