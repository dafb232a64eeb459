"""The parts of an optimizer step: accumulation windows, backward and step, item counts, Local SGD."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeAlias, final

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from accel_ops import collectives
from accel_ops.modules import replace_forward, replaced_attributes
from accel_ops.tree import by_device, walk
from accel_plugins.optimizer import is_lomo
from accel_plugins.strategy import Feature, Strategy
from accel_state.accelerator_state import AccumulationWindow, GradientState
from accel_state.errors import SettingsError, UnsupportedError
from accel_state.libraries import require
from accel_state.runtime import Runtime

if TYPE_CHECKING:
    from accel_plugins.optimizer import AcceleratedOptimizer
    from accel_train.accelerator import Accelerator
    from accel_train.profiling import StepMeter


class Synchronizer:
    """Count micro-batches, and keep gradients local until an accumulation window is complete.

    It is the context manager of windows of one micro-batch; longer windows use `Accumulation`. Models that
    different optimizers train have windows of their own.

    Args:
        state: Shows the window of the last micro-batch.
        no_sync: Keeps the gradients of a model local; `None` where there is one process.
        optimizers: The prepared optimizers.
    """

    __slots__ = ("_optimizers", "_state", "_windows", "accumulation", "no_sync")

    def __init__(
        self,
        state: GradientState,
        no_sync: Callable[[nn.Module], AbstractContextManager[None]] | None,
        optimizers: Sequence[torch.optim.Optimizer] = (),
    ) -> None:
        self._state = state
        self.no_sync = no_sync
        self._optimizers = optimizers
        self.accumulation = state.accumulation
        self._windows: list[tuple[set[int], AccumulationWindow]] = []

    def __enter__(self) -> None:
        """Begin a window of one micro-batch."""
        state = self._state
        if state.accumulation is not self.accumulation:
            state.activate(self.accumulation)
        window = state.window
        window.step, window.has_gradients, state.sync_gradients = 0, False, True

    def __exit__(self, *_: object) -> None:
        """Do nothing."""

    @property
    def state(self) -> GradientState:
        """The shared state, with the values of this `Accelerator`."""
        self._state.activate(self.accumulation)
        return self._state

    @property
    def step(self) -> int:
        """Micro-batches since the last optimizer step."""
        return self.state.window.step

    @step.setter
    def step(self, step: int) -> None:
        self.state.window = AccumulationWindow(step)
        self._windows.clear()

    def advance(self, models: Sequence[nn.Module] = ()) -> bool:
        """Count one micro-batch; return whether its gradients complete the window of these models."""
        state = self.state
        if len(self._optimizers) > 1 and models:
            state.window = self._window_of(models)
        window = state.window
        # The micro-batch that was to complete the window ran no backward pass: the next one completes it.
        is_late = window.step == 0 and window.has_gradients and not window.ran_backward
        window.has_gradients = is_late or (window.step > 0 and (window.has_gradients or window.ran_backward))
        window.ran_backward = False
        done = window.step + 1
        sync = is_late or done >= state.num_steps or (state.sync_with_dataloader and state.end_of_dataloader)
        window.step, state.sync_gradients = 0 if sync else done, sync
        return sync

    def _window_of(self, models: Sequence[nn.Module]) -> AccumulationWindow:
        """Return the window that the optimizers of these models share."""
        trained = {id(parameter) for model in models for parameter in model.parameters()}
        indices = {
            index
            for index, optimizer in enumerate(self._optimizers)
            if any(id(tensor) in trained for group in optimizer.param_groups for tensor in group["params"])
        }
        for others, window in self._windows:
            if others & indices or others == indices:
                others.update(indices)
                return window
        first = self._state.window if not self._windows else AccumulationWindow()
        self._windows.append((indices, first))
        return first

    @contextmanager
    def local(self, models: Sequence[nn.Module]) -> Generator[None]:
        """Keep the gradients of these models local within the block."""
        with ExitStack() as stack:
            if self.no_sync is not None:
                for model in models:
                    stack.enter_context(self.no_sync(model))
            yield

    def skips_sync(self) -> bool:
        """Return whether micro-batches inside a window leave their gradients local."""
        return self.no_sync is not None and not self._state.plugin_kwargs.get("sync_each_batch", False)


@dataclass(slots=True, eq=False)
class Accumulation:
    """One micro-batch: counted on entry, its gradients kept local unless it completes a window.

    It is a class and not a generator because it is entered once per micro-batch and has to be cheap.
    """

    synchronizer: Synchronizer
    models: Sequence[nn.Module]
    _local: AbstractContextManager[Any] | None = field(default=None, init=False)

    def __enter__(self) -> None:
        """Count the micro-batch."""
        if not self.synchronizer.advance(self.models) and self.synchronizer.skips_sync():
            self._local = self.synchronizer.local(self.models)
            self._local.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Exit the `no_sync` contexts of the models."""
        if self._local is not None:
            self._local.__exit__(kind, error, traceback)


def bind_backward(
    strategy: Strategy, engine: EngineCalls | None, hook: Callable[[], None] | None
) -> Callable[..., None]:
    """Return the backward function; `hook` is called after backward passes that do not end a window."""
    backward = strategy.backward if engine is None else engine.backward
    if hook is None:
        return backward

    def with_hook(loss: Tensor, *, accumulation: int, sync: bool, **kwargs: Any) -> None:
        backward(loss, accumulation=accumulation, sync=sync, **kwargs)
        if not sync:
            hook()

    return with_hook


def bind_step(strategy: Strategy, hooks: Sequence[Callable[[], None] | None]) -> Callable[..., bool | Tensor]:
    """Return an optimizer step function that calls hooks after each step."""
    step = strategy.step
    if getattr(step, "__func__", None) is Strategy.step:
        step = strategy.precision.step  # the same, without a call in between
    calls = [hook for hook in hooks if hook is not None]
    if not calls:
        return step

    def with_hooks(*args: Any) -> bool | Tensor:
        stepped = step(*args)
        for call in calls:
            call()
        return stepped

    return with_hooks


@final
class EngineCalls:
    """Route the calls of models to an engine that runs forward and backward at once."""

    def __init__(self, strategy: Strategy, state: GradientState) -> None:
        self._train_step: Any = strategy.train_step
        self._name = strategy.name
        self._state = state
        self._returned: Any = WeakIdKeyDictionary()

    def route(self, model: nn.Module) -> None:
        """Route calls in training mode, with gradients enabled, through the engine."""

        def routed(forward: Callable[..., Any], model: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not (model.training and torch.is_grad_enabled()):
                return forward(model, *args, **kwargs)
            output = self._train_step(
                model,
                lambda *args, **kwargs: forward(model, *args, **kwargs),
                args,
                kwargs,
                accumulation=self._state.num_steps,
                sync=self._state.sync_gradients,
            )
            for _, leaf in walk(output):
                if isinstance(leaf, Tensor):
                    self._returned[leaf] = True
            return output

        replace_forward(model, routed)

    def backward(self, loss: Tensor, *, accumulation: int, sync: bool, **kwargs: Any) -> None:
        """Accept a loss whose gradients the engine has computed.

        Raises:
            SettingsError: The loss is not the engine's, or there are arguments for a backward pass.
        """
        del accumulation, sync
        if kwargs or loss not in self._returned:
            what = f"arguments {', '.join(kwargs)}" if kwargs else "a tensor that no model returned"
            raise SettingsError(
                f"backward() got {what}: the strategy {self._name!r} computes gradients when the model is "
                "called, for the loss that it returns. Pass only that tensor."
            )


ItemCount: TypeAlias = "int | float | torch.Tensor"
"""A number of items: 0 or more, a tensor of one element to leave it where it was computed."""


class ItemWindow:
    """Count the items of summed losses since the last optimizer step, and divide gradients by them.

    A window begins with the first counted backward pass and ends with an optimizer step. Its gradients hold
    the sum over the micro-batches (averaged over processes by the strategy) until `normalize` divides them
    by the number of items of all processes. A later backward pass first undoes the division, so that a
    window may grow at any time.

    Attributes:
        is_open (bool): Whether items have been counted since the last optimizer step.
        holds (int): Number of blocks that postpone normalization, since micro-batches are certain to follow.
    """

    def __init__(
        self,
        runtime: Runtime,
        parameters: Callable[[], Iterable[torch.Tensor]],
        meter: StepMeter | None = None,
    ) -> None:
        self._runtime = runtime
        self._parameters = parameters
        self._meter = meter
        self._total: torch.Tensor | None = None
        self._count: torch.Tensor | None = None
        self._divisor: torch.Tensor | None = None
        self.holds = 0
        self._refusing: str | None = None
        self._is_local = False
        self.is_open = False  # not a property, since every step reads it

    def add(self, num_items: ItemCount) -> None:
        """Count the items of one micro-batch, before its backward pass."""
        if self._refusing is not None:
            raise UnsupportedError(
                f"backward(num_items={num_items!r}) within {self._refusing}: counting the items of a "
                "window needs every process, but a process without batches would not take part."
            )
        count = self._tensor(num_items)
        # Gradients that are not synchronised yet may be out of sight, as with FSDP2. Later, `zero_grad` of a
        # model may have thrown them away.
        if self._count is not None and (self._divisor is None or self._gradients()):
            if self._divisor is not None:
                _scale(torch._foreach_mul_, self._gradients(), self._divisor)
            count = self._count + count
        self._count, self._divisor, self.is_open = count, None, True

    def normalize(self) -> None:
        """Divide the gradients by the number of items of the window, once; do nothing without items.

        A collective if there are several processes.
        """
        if self._count is None or self._divisor is not None:
            return
        total, processes = self._count.clone(), 1
        if not self._is_local:
            self._runtime.collectives.all_reduce(total)
            processes = self._runtime.topology.world_size
        self._total = total
        # The gradients are the mean over the ranks of the sum on each rank.
        self._divisor = torch.where(total == 0, torch.ones_like(total), total / processes)
        _scale(torch._foreach_div_, self._gradients(), self._divisor)

    def close(self, *, used: bool = False) -> None:
        """Begin a new window."""
        if used and self._meter is not None and self._total is not None:
            self._meter.count_items(self._total, of_all_ranks=not self._is_local)
        self._count = self._divisor = self._total = None
        self.is_open = False

    @contextmanager
    def hold(self, inner: AbstractContextManager[Any]) -> Generator[None]:
        """Enter another context manager, and postpone normalization until its end."""
        self.holds += 1
        try:
            with inner:
                yield
        finally:
            self.holds -= 1

    def refuse(self, where: str) -> AbstractContextManager[None]:
        """Refuse to count items within a block; `where` names it in the message."""
        return replaced_attributes(self, {"_refusing": where})

    def count_locally(self) -> AbstractContextManager[None]:
        """Count and normalize on this rank alone within a block, since its gradients are local."""
        return replaced_attributes(self, {"_is_local": True})

    def _tensor(self, num_items: ItemCount) -> torch.Tensor:
        device = self._runtime.device
        # The same dtype on all ranks, whatever the type of their counts; float64 is exact below 2**53.
        # MPS and some of Intel's GPUs lack it; float32 is exact below 2**24.
        dtype = torch.float32 if device.type in {"mps", "xpu"} else torch.float64
        if isinstance(num_items, torch.Tensor):
            if num_items.numel() != 1:
                raise ValueError(
                    f"backward(num_items=…) got a tensor of shape {tuple(num_items.shape)}. Pass one "
                    "number, such as `(labels != -100).sum()`."
                )
            return num_items.detach().to(device=device, dtype=dtype).reshape(())
        if isinstance(num_items, bool) or not num_items >= 0:
            raise ValueError(f"backward(num_items={num_items!r}): pass the number of items, 0 or more.")
        return torch.tensor(num_items, device=device, dtype=dtype)

    def _gradients(self) -> list[torch.Tensor]:
        parameters = {id(parameter): parameter for parameter in self._parameters()}
        if not parameters:
            raise ValueError(
                "backward(num_items=…) divides the gradients of prepared models and optimizers, but "
                "nothing was prepared. Pass them to accelerator.prepare() first."
            )
        return [parameter.grad for parameter in parameters.values() if parameter.grad is not None]


def _scale(operation: Callable[..., object], gradients: list[torch.Tensor], number: torch.Tensor) -> None:
    for group in by_device(gradients):
        operation(group, number.to(group[0].device))


def fused_backward(
    optimizers: Iterable[AcceleratedOptimizer], loss: Tensor, learning_rate: float | None
) -> None:
    """Run the backward pass of every lomo-optim optimizer, which also steps it."""
    require("lomo", "lomo_backward()")
    if learning_rate is None:
        raise SettingsError(
            "lomo_backward(learning_rate=None): Lomo steps in this call, so pass the learning rate."
        )
    inner: list[Any] = [wrapped.optimizer for wrapped in optimizers]
    fused = [optimizer for optimizer in inner if is_lomo(optimizer)]
    if not fused:
        names = [type(optimizer).__qualname__ for optimizer in inner]
        raise SettingsError(
            "lomo_backward() needs a prepared optimizer of lomo-optim (Lomo or AdaLomo), but found "
            f"{names}. Use backward() for others."
        )
    for optimizer in fused:
        optimizer.fused_backward(loss, learning_rate)


class LocalSGD:
    """Context manager in which ranks train on local gradients and average their models every few steps.

    Communication takes place every `local_sgd_steps` optimizer steps instead of every step, which changes the
    results (https://arxiv.org/abs/1805.09767). At its end, all processes have the same model again.
    `backward(num_items=…)` divides by the items of each process within it.

    Args:
        accelerator: The `Accelerator` that has prepared the model.
        model: The prepared model.
        local_sgd_steps: Optimizer steps between two averages.
        enabled: Whether to average; with one process there is nothing to average.

    Raises:
        SettingsError: `local_sgd_steps` is not a positive integer.
        UnsupportedError: The strategy has no gradients local to one process, or there are replica
            groups.

    Example:
        >>> from accel_train import Accelerator
        >>> accelerator = Accelerator(cpu=True)
        >>> model = torch.nn.Linear(1, 1)
        >>> model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters()))
        >>> with LocalSGD(accelerator, model, local_sgd_steps=8) as local_sgd:
        ...     for batch in torch.ones(10, 1):
        ...         accelerator.backward(model(batch).sum())
        ...         optimizer.step()
        ...         optimizer.zero_grad()
        ...         local_sgd.step()
    """

    def __init__(
        self, accelerator: Accelerator, model: nn.Module, local_sgd_steps: int, enabled: bool = True
    ) -> None:
        if isinstance(local_sgd_steps, bool) or not isinstance(local_sgd_steps, int) or local_sgd_steps < 1:
            raise SettingsError(
                f"LocalSGD(local_sgd_steps={local_sgd_steps!r}): expected a whole number above 0."
            )
        parts = accelerator._parts
        self.enabled = enabled and accelerator.use_distributed
        if self.enabled:
            parts.strategy.require(Feature.NO_SYNC, "LocalSGD()")
            if parts.strategy.replicas is not None:
                raise UnsupportedError(
                    "LocalSGD() averages over one replica group, and the others differ: use torchft's, by "
                    "Accelerator(kwargs_handlers=[ReplicaSyncKwargs(sync_every=...)])."
                )
        self.accelerator = accelerator
        self.model = model
        self.local_sgd_steps = local_sgd_steps
        self.num_steps = 0
        self._parts = parts
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        """Keep gradients local."""
        if self.enabled:
            self._stack.enter_context(self._parts.strategy.no_sync(self.model))
            self._stack.enter_context(self._parts.items.count_locally())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Average the models, unless an error ends the context, and synchronise gradients again."""
        self._stack.close()
        if self.enabled and kind is None:
            self._sync_and_avg_model_params(buffers=True)

    def step(self) -> None:
        """Count an optimizer step, and average the models if they are due.

        Call it after every optimizer step, on all processes. Micro-batches that do not complete a step do not
        count.
        """
        if not self._parts.gradient_state.sync_gradients:
            return
        self.num_steps += 1
        if self.enabled and self.num_steps % self.local_sgd_steps == 0:
            self._sync_and_avg_model_params()

    def _sync_and_avg_model_params(self, *, buffers: bool = False) -> None:
        trained = [parameter.data for parameter in self.model.parameters() if parameter.requires_grad]
        if buffers:  # such as the running statistics of BatchNorm, of the batches of each rank
            trained += [buffer for buffer in self.model.buffers() if buffer.is_floating_point()]
        torch._foreach_copy_(trained, collectives.reduce(trained, "mean"))
