"""Single process; stepper, persister of replicas."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from accel_ops.modules import extract_model_from_parallel, without_compiler
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
from accel_state.errors import SettingsError, UnsupportedError
from accel_state.runtime import Runtime
from accel_state.settings.model import Settings

if TYPE_CHECKING:
    from torch.optim import Optimizer


def check_materialised(bundle: Bundle) -> None:
    """Refuse models with parameters that are not materialised."""
    for model in bundle.models:
        for name, parameter in model.named_parameters():
            if is_lazy(parameter):
                raise SettingsError(
                    f"{type(model).__name__}: the parameter {name!r} of a lazy module has no shape yet; "
                    "run one batch through the model before prepare()."
                )
            if parameter.is_meta:
                raise SettingsError(
                    f"{type(model).__name__}: the parameter {name!r} is on the meta device; "
                    "load the weights before prepare()."
                )


def move_to_device(bundle: Bundle, device: torch.device) -> list[nn.Module]:
    """Move models to the device, in order, except those whose placement the caller has forbidden.

    Parameters stay the same objects, so that optimizers keep pointing at them.
    """
    return [
        model.to(device) if bundle.may_move(index) else model for index, model in enumerate(bundle.models)
    ]


class ReplicatedPersister:
    """Persister of replicated models."""

    __slots__ = ()

    def full_state_dict(self, model: nn.Module, *, keep: bool = True) -> StateDict:
        """Return the state dict of the unwrapped model."""
        del keep
        return _core(model).state_dict()

    def iter_full_state_dict(self, model: nn.Module, *, keep: bool = True) -> Iterator[StateDict]:
        """Yield the state dict at once: it needs no gathering."""
        yield self.full_state_dict(model, keep=keep)

    def load_full_state_dict(self, model: nn.Module, state: Mapping[str, Any], **options: Any) -> Any:
        """Load a state dict into the unwrapped model."""
        return _core(model).load_state_dict(state, **options)

    def full_optimizer_state(
        self, optimizer: Optimizer, models: Sequence[nn.Module], *, keep: bool = True
    ) -> StateDict:
        """Return the state dict of the optimizer."""
        del models, keep
        return optimizer.state_dict()

    def load_full_optimizer_state(
        self, optimizer: Optimizer, models: Sequence[nn.Module], state: Mapping[str, Any]
    ) -> None:
        """Load a state dict into the optimizer."""
        del models
        optimizer.load_state_dict(dict(state))


def _core(model: nn.Module) -> nn.Module:
    return extract_model_from_parallel(model, keep_torch_compile=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchStepper:
    """Stepper of parameters that PyTorch's optimizers step; by default, of ordinary tensors.

    Args:
        no_sync_of: Makes the context in which a model's gradients stay local.
        join_of: Makes the context in which ranks may finish early, from the joinables and
            `divide_by_initial_world_size`.
        around_backward: Makes a context for the duration of every backward pass.
        around_step: Makes a context for the duration of every step of an optimizer.
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
    """Steps an optimizer, as the precision does; no call of ours in between."""

    def __post_init__(self) -> None:
        """Take the step of the precision."""
        step = self.precision.step if self.around_step is None else partial(_step_within, self)
        object.__setattr__(self, "step", step)

    def backward(self, loss: Tensor, *, accumulation: int, sync: bool, **kwargs: Any) -> None:
        """Add the gradients of `loss / accumulation` to the parameters."""
        del sync  # said by `no_sync` around the forward pass
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
        """Accumulate gradients without reducing them."""
        return nullcontext() if self.no_sync_of is None else self.no_sync_of(model)

    def join(
        self, joinables: Sequence[Any], *, divide_by_initial_world_size: bool = True
    ) -> AbstractContextManager[None]:
        """Let ranks have different numbers of batches, as `torch.distributed.algorithms.Join`."""
        return (
            nullcontext() if self.join_of is None else self.join_of(joinables, divide_by_initial_world_size)
        )

    def clip_grad_norm(
        self, parameters: Parameters, max_norm: float, norm_type: float = 2.0, *, optimizers: Optimizers = ()
    ) -> Tensor:
        """Scale the gradients down to a norm of at most `max_norm`; return the norm before that."""
        return self.clip_norm(unscaled(self.precision, parameters, optimizers), max_norm, norm_type)

    def clip_grad_value(
        self, parameters: Parameters, clip_value: float, *, optimizers: Optimizers = ()
    ) -> None:
        """Clamp every gradient to `[-clip_value, clip_value]`."""
        parameters = unscaled(self.precision, parameters, optimizers)
        several = [parameters] if isinstance(parameters, torch.Tensor) else parameters
        if any(one.grad is not None for one in several):  # a rank's shards may be empty; torch wants one
            self.clip_value(several, clip_value)


def _step_within(stepper: TorchStepper, optimizer: Optimizer, closure: Any = None) -> bool | Tensor:
    context: Any = stepper.around_step
    with context(optimizer):
        return stepper.precision.step(optimizer, closure)


def unscaled(
    precision: PrecisionPolicy, parameters: Parameters, optimizers: Optimizers
) -> Tensor | list[Tensor]:
    """Unscale the gradients of the optimizers that own any of the parameters; return the parameters."""
    clipped = parameters if isinstance(parameters, torch.Tensor) else [*parameters]
    if precision.scaler is not None:
        ids = {id(clipped)} if isinstance(clipped, torch.Tensor) else {id(one) for one in clipped}
        precision.unscale(one for one in optimizers if _owns(one, ids))
    return clipped


def _owns(optimizer: Optimizer, ids: set[int]) -> bool:
    return any(id(p) in ids for group in optimizer.param_groups for p in group["params"])


@dataclass(frozen=True, slots=True, kw_only=True)
class SingleWrapper:
    """Model wrapper that moves models to the device."""

    device: torch.device

    def check(self, bundle: Bundle) -> None:
        """Refuse models with parameters on the meta device."""
        check_materialised(bundle)

    def wrap(self, bundle: Bundle, *, evaluation: bool = False) -> Bundle:
        """Move the models to the device."""
        del evaluation
        return replace(bundle, models=move_to_device(bundle, self.device))

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the model."""
        return model


def build(
    settings: Settings, runtime: Runtime, precision: PrecisionPolicy, handlers: Mapping[type, Any]
) -> Strategy:
    """Make the strategy of a run with one process; `settings` and `handlers` change nothing about it."""
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


@contextmanager
def sync_in_backward(model: nn.Module) -> Generator[None]:
    """Synchronise gradients in the backward pass within, although the forward pass ran in `no_sync`."""
    inner = without_compiler(model)
    if isinstance(inner, DistributedDataParallel):
        with _of_ddp(inner):
            yield
    elif _is_sharded(inner):
        sharded: Any = inner
        sharded.set_requires_gradient_sync(True)
        yield
    else:
        yield


def _is_sharded(model: nn.Module) -> bool:
    fsdp = sys.modules.get("torch.distributed.fsdp")  # a sharded model has imported it
    return fsdp is not None and isinstance(model, fsdp.FSDPModule)


@contextmanager
def _of_ddp(inner: DistributedDataParallel) -> Generator[None]:
    if inner.find_unused_parameters:
        raise UnsupportedError(
            "trigger_sync_in_backward() with find_unused_parameters=True: which parameters are unused is "
            "found out in a forward pass that synchronises; leave the option out, or run the last forward "
            "pass outside of no_sync()."
        )
    before = inner.require_backward_grad_sync, inner.require_forward_param_sync
    inner.require_backward_grad_sync = inner.require_forward_param_sync = True
    # What the forward pass would have done: https://docs.pytorch.org/docs/stable/notes/ddp.html
    inner.reducer.prepare_for_backward([])
    try:
        yield
    finally:
        inner.require_backward_grad_sync, inner.require_forward_param_sync = before
