"""The strategy DDP: its options, the model wrapper and communication hooks that compress gradients."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join, Joinable
from torch.nn.parallel import DistributedDataParallel

from accel_ops.modules import without_compiler
from accel_plugins.host_copies import buckets_of
from accel_plugins.kwargs import KwargsHandler, expect, expect_counts, expect_flags
from accel_plugins.strategy import Bundle, Strategy
from accel_plugins.unsharded import move_to_device
from accel_state import hang_monitor
from accel_state.labels import DDPCommunicationHookType
from accel_state.logging import get_logger

if TYPE_CHECKING:
    from torch.optim import Optimizer

logger = logging.getLogger(__name__)
_main_logger = get_logger(__name__)

_Hook = DDPCommunicationHookType


@dataclass
class DistributedDataParallelKwargs(KwargsHandler):
    """Options of `torch.nn.parallel.DistributedDataParallel`.

    Args:
        dim: Dim along which inputs are split over several devices of one process.
        broadcast_buffers: Whether rank 0 broadcasts its buffers at the start of every forward pass.
        bucket_cap_mb: Size in MiB of the buckets in which gradients are all-reduced.
        find_unused_parameters: Whether to search for parameters that a forward pass did not use.
        check_reduction: Deprecated by PyTorch; has no effect there.
        gradient_as_bucket_view: Whether gradients are views of the buckets, which saves a copy of them.
        static_graph: Whether the same parameters are used in every pass.
        comm_hook: Communication hook that compresses gradients; a name or a member.
        comm_wrapper: `FP16` or `BF16`: dtype to which the hook's messages are compressed further.
        comm_state_option: Arguments of `PowerSGDState`, for the two PowerSGD hooks.

    Raises:
        SettingsError: A field is unknown or out of its range.

    Example:
        >>> DistributedDataParallelKwargs(find_unused_parameters=True, comm_hook="fp16").to_kwargs()
        {'find_unused_parameters': True}
    """

    dim: int = 0
    broadcast_buffers: bool = True
    bucket_cap_mb: int = 25
    find_unused_parameters: bool = False
    check_reduction: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    comm_hook: DDPCommunicationHookType = DDPCommunicationHookType.NO
    comm_wrapper: DDPCommunicationHookType = DDPCommunicationHookType.NO
    comm_state_option: dict[str, Any] = field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        expect_flags(self)
        expect(self, "dim", "an integer", isinstance(self.dim, int))
        expect_counts(self, "bucket_cap_mb")
        for name, choices in (("comm_hook", _Hook), ("comm_wrapper", (_Hook.NO, _Hook.FP16, _Hook.BF16))):
            values = [choice.value for choice in choices]
            hook = getattr(self, name)
            expect(self, name, f"one of {values}", getattr(hook, "value", hook) in values)
            setattr(self, name, _Hook(hook))
        if self.comm_state_option and not self.comm_hook.value.endswith("power_sgd"):
            _main_logger.warning_once(
                f"DistributedDataParallelKwargs(comm_state_option={self.comm_state_option!r}) has no effect "
                f"with comm_hook={self.comm_hook.value!r}, only with 'power_sgd' or 'batched_power_sgd'."
            )

    def to_dict(
        self, ignore_keys: tuple[str, ...] = ("comm_hook", "comm_wrapper", "comm_state_option")
    ) -> dict[str, Any]:
        """Return the fields that are arguments of `DistributedDataParallel`.

        Args:
            ignore_keys: Fields to omit.
        """
        return {name: value for name, value in super().to_dict().items() if name not in ignore_keys}

    def register_comm_hook(self, model: DistributedDataParallel) -> None:
        """Register the communication hook of these options, if there is one.

        Args:
            model: A wrapped model that has no hook yet.
        """
        if self.comm_hook is _Hook.NO and self.comm_wrapper is _Hook.NO:
            return
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

        # torch's function is for batches of matrices, and `batched_powerSGD_hook` gives it one matrix:
        # https://github.com/pytorch/pytorch/pull/75157
        orthogonalize: Callable[..., None] = powerSGD_hook._orthogonalize
        if self.comm_hook is _Hook.BATCHED_POWER_SGD and not hasattr(orthogonalize, "__wrapped__"):

            @wraps(orthogonalize)
            def of_any_dims(matrices: Tensor, epsilon: float = 0) -> None:
                orthogonalize(matrices if matrices.dim() == 3 else matrices.unsqueeze(0), epsilon)

            powerSGD_hook._orthogonalize = of_any_dims
        functions: dict[_Hook, Callable[..., Any]] = {
            _Hook.NO: default_hooks.allreduce_hook,
            _Hook.FP16: default_hooks.fp16_compress_hook,
            _Hook.BF16: default_hooks.bf16_compress_hook,
            _Hook.POWER_SGD: powerSGD_hook.powerSGD_hook,
            _Hook.BATCHED_POWER_SGD: powerSGD_hook.batched_powerSGD_hook,
        }
        function, state = functions[self.comm_hook], cast("Any", model.process_group)
        if self.comm_wrapper is _Hook.FP16:
            function = default_hooks.fp16_compress_wrapper(function)
        elif self.comm_wrapper is _Hook.BF16:
            function = default_hooks.bf16_compress_wrapper(function)
        if self.comm_hook.value.endswith("power_sgd"):
            state = powerSGD_hook.PowerSGDState(**{"process_group": state, **self.comm_state_option})
        model.register_comm_hook(state, function)


class MonitoredDDP(DistributedDataParallel):
    """DDP whose own collectives in the forward pass, for buffers and for new buckets, are monitored."""

    averaged: AbstractSet[int] = frozenset()
    """The identities of the parameters whose gradients it averages."""
    was_called = False
    """Whether a pass to be trained went through it: without one, it averages nothing."""

    # `torch.compiler.disable` would import the compiler.
    @torch._disable_dynamo(recursive=False)
    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        self.was_called |= torch.is_grad_enabled()
        with hang_monitor.collective_scope("forward"):
            return super()._pre_forward(*inputs, **kwargs)

    @torch._disable_dynamo(recursive=False)
    def _post_forward(self, output: Any) -> Any:
        with hang_monitor.collective_scope("forward"):
            return super()._post_forward(output)

    def _get_name(self) -> str:
        return DistributedDataParallel.__name__  # `print(model)` shows torch's own name


class DdpStrategy(Strategy):
    """Put models into `DistributedDataParallel`, in a run with several processes."""

    name = "ddp"
    keeps_sharded = True

    def wrap(self, bundle: Bundle, *, evaluation: bool = False) -> Bundle:
        """Move models to the device and wrap the trainable ones, which broadcasts the values of rank 0."""
        models = move_to_device(bundle, self.runtime.device)
        for index, model in enumerate(() if evaluation else models):
            is_trained = any(parameter.requires_grad for parameter in model.parameters())
            if is_trained and not isinstance(without_compiler(model), DistributedDataParallel):
                models[index] = self.wrap_model(model)
        return replace(bundle, models=models)

    def unwrap(self, model: nn.Module) -> nn.Module:
        return model.module if isinstance(model, DistributedDataParallel) else model

    def wrap_model(self, model: nn.Module) -> DistributedDataParallel:
        """Wrap a model that is on its device."""
        devices = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
        is_on_accelerator = len(devices) == 1 and next(iter(devices)).type != "cpu"
        options: DistributedDataParallelKwargs | None = self.handlers.get(DistributedDataParallelKwargs)
        arguments = {} if options is None else options.to_kwargs()
        with hang_monitor.collective_scope("prepare"), warnings.catch_warnings():
            # The documented option, with the documented meaning, is deprecated by newer versions of torch.
            warnings.filterwarnings("ignore", message=".*`broadcast_buffers` is deprecated")
            wrapped = MonitoredDDP(model, device_ids=[*devices] if is_on_accelerator else None, **arguments)
        wrapped.averaged = {id(p) for p in model.parameters() if p.requires_grad}
        _wrapped.add(wrapped)
        if options is not None:
            options.register_comm_hook(wrapped)
        return wrapped

    def gradient_buckets(self, models: Sequence[nn.Module]) -> list[Tensor]:
        inner = [without_compiler(model) for model in models]
        reducers = [model.reducer for model in inner if isinstance(model, DistributedDataParallel)]
        return [bucket for reducer in reducers for bucket in buckets_of(reducer)]

    def backward(self, loss: Tensor, *, accumulation: int, sync: bool, **kwargs: Any) -> None:
        with hang_monitor.collective_scope("backward"):
            super().backward(loss, accumulation=accumulation, sync=sync, **kwargs)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        inner = without_compiler(model)
        if not isinstance(inner, DistributedDataParallel):
            return nullcontext()
        if inner.static_graph and inner not in _graphs_seen:
            # torch records a static graph in the first pass and fails if that is not synchronised. Averaging
            # the first micro-batch early gives the same sum: later averages keep a term equal on all ranks.
            _graphs_seen.add(inner)
            return nullcontext()
        return inner.no_sync()

    def join(self, joinables: Sequence[Any]) -> AbstractContextManager[None]:
        inside = [without_compiler(joinable) for joinable in joinables]
        members: list[Joinable] = [joinable for joinable in inside if isinstance(joinable, Joinable)]
        if not members:
            logger.warning(
                "join_uneven_inputs(%s) has no effect: none of these takes part in collectives. Prepare the "
                "models that are trained.",
                [type(joinable).__name__ for joinable in joinables],
            )
            return nullcontext()
        return Join(members)  # pyright: ignore[reportReturnType] - a context manager without annotations

    def step(self, optimizer: Optimizer, closure: Callable[[], float] | None = None) -> bool | Tensor:
        _warn_about_local_gradients(optimizer)
        return self.precision.step(optimizer, closure)


_wrapped: WeakSet[MonitoredDDP] = WeakSet()
_graphs_seen: WeakSet[nn.Module] = WeakSet()


def _warn_about_local_gradients(optimizer: Optimizer) -> None:
    """Warn once if an optimizer steps on a gradient that DDP has not averaged.

    Not an error, since programs may average gradients themselves.
    """
    averaged = [wrapped.averaged for wrapped in _wrapped if wrapped.was_called]
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is None or any(id(parameter) in known for known in averaged):
                continue
            if any(id(parameter) in model.averaged for model in _wrapped):
                reason = "call the model that prepare() returned, not unwrap_model(model) or model.module"
            else:
                reason = (
                    "unfreeze parameters before prepare(), or prepare accelerator.unwrap_model(model) again"
                )
            _main_logger.warning_once(
                "%s steps on a gradient of shape %s that the ranks have not averaged, so that their models "
                "differ afterwards, unless the program averages it: %s.",
                type(optimizer).__qualname__,
                tuple(parameter.shape),
                reason,
            )
            return
