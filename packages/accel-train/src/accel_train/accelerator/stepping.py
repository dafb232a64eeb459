"""Facet of `Accelerator`: backward, accumulate, clip and mixed precision."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer

from accel_plugins.ddp import DistributedDataParallelKwargs
from accel_plugins.fp8.recipe import AORecipeKwargs, MSAMPRecipeKwargs, TERecipeKwargs
from accel_plugins.kwargs import (
    AutocastKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
)
from accel_plugins.optimizer import without_wrapper
from accel_plugins.precision import switch_autocast, switch_scaler, with_autocast_options
from accel_plugins.strategy import Feature
from accel_plugins.unsharded import sync_in_backward
from accel_state.accelerator_state import GradientState
from accel_state.errors import UnsupportedError
from accel_train.accelerator.build import with_recipe_handler
from accel_train.accelerator.run import Facet
from accel_train.data.adapter import override_even_batches
from accel_train.step import Accumulation, ItemCount, fused_backward

if TYPE_CHECKING:
    from torch.amp.grad_scaler import GradScaler


class SteppingFacet(Facet):
    """Backward passes, accumulation, clipping and mixed precision."""

    __slots__ = ()

    def backward(self, loss: Tensor, *, num_items: ItemCount | None = None, **kwargs: Any) -> None:
        """Compute gradients, scaled for accumulation and, with float16, for precision.

        Without `num_items`, the optimizer follows the mean of the micro-batches' losses, even if their
        numbers of items differ. With it, the optimizer follows the mean over all items of all micro-batches
        and processes: exactly the gradient of one large batch.

        Args:
            loss: The loss of one micro-batch, 0-d: its mean over the samples of this process; with
                `num_items` the sum over its items.
            num_items: How many items (tokens, samples) `loss` is the sum of; 0 or more, a number or a tensor
                of one element. The counts of all backward passes of a window add up: for several losses over
                the same items, pass the count with one of them and 0 with the others. Gradients are divided
                by the total when the window is complete.
            **kwargs: Passed to `Tensor.backward`; or `learning_rate`, as for `lomo_backward`.

        Raises:
            TypeError: The loss is not a tensor.
            ValueError: `num_items` is invalid, or was passed only in some backward passes of a window.
            UnsupportedError: The strategy cannot count items, or `num_items` was passed within
                `join_uneven_inputs` or with `learning_rate`.

        Example:
            >>> import torch
            >>> from accel_train import Accelerator
            >>> weight = torch.ones(1, requires_grad=True)
            >>> Accelerator(cpu=True).backward(3 * weight.sum())
            >>> weight.grad
            tensor([3.])
        """
        parts = self._parts
        state, accumulation = parts.gradient_state, parts.synchronizer.accumulation
        if state.accumulation is not accumulation:
            state.activate(accumulation)
        state.window.ran_backward = True
        if parts.meter is not None:
            parts.meter.count_batch()
        if not isinstance(loss, Tensor):
            raise TypeError(
                f"backward({loss!r}): expected the loss as a tensor with gradients, not as item()."
            )
        if kwargs and "learning_rate" in kwargs:
            if num_items is not None:
                raise UnsupportedError(
                    f"backward(num_items={num_items!r}, learning_rate=…): Lomo steps in this call, so its "
                    "gradients cannot be divided by a number of items afterwards. Divide the loss."
                )
            self.lomo_backward(loss / state.num_steps, **kwargs)
            return
        if num_items is not None:
            self._backward_of_items(loss, num_items, kwargs)
            return
        if parts.items.is_open:
            raise ValueError(
                "backward() without num_items follows backward(num_items=…) before an optimizer step. "
                "Pass num_items with every loss of a step, and 0 for items that are already counted."
            )
        if kwargs:
            parts.backward(loss, accumulation=state.num_steps, sync=state.sync_gradients, **kwargs)
        else:  # a call with ** would cost more than the checks above
            parts.backward(loss, accumulation=state.num_steps, sync=state.sync_gradients)

    def lomo_backward(self, loss: Tensor, learning_rate: float) -> None:
        """Compute gradients and step at once, as the optimizers Lomo and AdaLomo do.

        Args:
            loss: The loss, 0-d.
            learning_rate: The learning rate of this step.

        Raises:
            MissingDependencyError: lomo-optim is not installed.
            SettingsError: The learning rate is missing, or no such optimizer was prepared.
        """
        parts = self._parts
        fused_backward(parts.prepared.optimizers, parts.precision.scale(loss), learning_rate)
        if parts.preemption is not None:
            parts.preemption.count_optimizer_step()

    @staticmethod
    def trigger_sync_in_backward(model: nn.Module) -> AbstractContextManager[None]:
        """Synchronise gradients in backward passes within the block, whose forward passes ran in `no_sync`.

        Use it for several forward passes followed by as many backward passes, if only the last one shall
        communicate.

        Args:
            model: A prepared model; with one process nothing happens.

        Raises:
            UnsupportedError: The model has `find_unused_parameters`, which works in the forward pass only.

        Example:
            >>> import torch
            >>> from accel_train import Accelerator
            >>> accelerator = Accelerator(cpu=True)
            >>> model = accelerator.prepare(torch.nn.Linear(1, 1))
            >>> with accelerator.no_sync(model):
            ...     first, second = model(torch.ones(1)), model(torch.zeros(1))
            >>> accelerator.backward(first)
            >>> with accelerator.trigger_sync_in_backward(model):
            ...     accelerator.backward(second)
        """
        return sync_in_backward(model)

    def accumulate(self, *models: nn.Module) -> AbstractContextManager[None]:
        """Run one of the `gradient_accumulation_steps` micro-batches of an optimizer step.

        Within it, prepared optimizers and schedulers act only if the micro-batch completes the step. The last
        micro-batch of a loader always does. Until then, gradients stay local.

        Args:
            *models: The models that are trained within the block.

        Example:
            >>> import torch
            >>> from accel_train import Accelerator
            >>> accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
            >>> weight = torch.nn.Parameter(torch.ones(1))
            >>> optimizer = accelerator.prepare(torch.optim.SGD([weight], lr=0.5))
            >>> for _ in range(3):
            ...     with accelerator.accumulate():
            ...         accelerator.backward(weight.sum())
            ...         optimizer.step()
            ...         optimizer.zero_grad()
            ...         weight.item()
            1.0
            0.5
            0.5
        """
        parts = self._parts
        synchronizer = parts.synchronizer
        state = parts.gradient_state
        if state.accumulation is not synchronizer.accumulation:
            state.activate(synchronizer.accumulation)
        return synchronizer if state.num_steps == 1 else Accumulation(synchronizer, models)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Keep the gradients of a model local in backward passes within the block.

        The next backward pass outside synchronises all of them.

        Args:
            model: A prepared model.
        """
        parts = self._parts
        return parts.items.hold(parts.synchronizer.local([model]))

    @contextmanager
    def join_uneven_inputs(
        self, joinables: Sequence[Any], even_batches: bool | None = None
    ) -> Generator[None]:
        """Allow ranks to have different numbers of batches: a rank without batches still joins collectives.

        Args:
            joinables: The prepared models, and optimizers that are `torch.distributed` joinables. Several
                models each need a backward pass of their own, in this order.
            even_batches: Replaces the accelerator's `even_batches` within the context, for prepared loaders
                of map-style datasets.

        Raises:
            UnsupportedError: The strategy does not support uneven inputs.
        """
        parts = self._parts
        parts.strategy.require(Feature.UNEVEN_INPUTS, "join_uneven_inputs()")
        inner = [without_wrapper(joinable) for joinable in joinables]
        with (
            parts.items.refuse("join_uneven_inputs()"),
            override_even_batches(parts.prepared.dataloaders, even_batches),
            parts.strategy.stepper.join(inner),
        ):
            yield

    def clip_grad_norm_(
        self, parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2
    ) -> Tensor | None:
        """Clip gradients to a maximum total norm; use instead of `torch.nn.utils.clip_grad_norm_`.

        Args:
            parameters: Tensors with gradients.
            max_norm: The largest norm allowed.
            norm_type: The order of the norm; `float("inf")` for the largest absolute value.

        Returns:
            The norm before clipping, 0-d, the same on all processes.

        Raises:
            RuntimeError: A scaled loss is being accumulated, so the gradients are incomplete.

        Example:
            >>> import torch
            >>> from accel_train import Accelerator
            >>> weight = torch.nn.Parameter(torch.zeros(1))
            >>> weight.grad = torch.tensor([4.0])
            >>> Accelerator(cpu=True).clip_grad_norm_([weight], 1.0), weight.grad
            (tensor(4.), tensor([1.0000]))
        """
        parts = self._parts
        _check_parameters(parameters, "clip_grad_norm_")
        optimizers = self._scaled_optimizers("clip_grad_norm_()")
        self._normalize_gradients()
        return parts.strategy.stepper.clip_grad_norm(parameters, max_norm, norm_type, optimizers=optimizers)

    def clip_grad_value_(self, parameters: Tensor | Iterable[Tensor], clip_value: float) -> None:
        """Clamp gradients; use instead of `torch.nn.utils.clip_grad_value_`.

        Args:
            parameters: Tensors with gradients.
            clip_value: The largest absolute value allowed.

        Raises:
            UnsupportedError: The strategy stores gradients in a form that cannot be clamped.
            RuntimeError: A scaled loss is being accumulated, so the gradients are incomplete.
        """
        what = "clip_grad_value_()"
        _check_parameters(parameters, "clip_grad_value_")
        strategy = self._parts.strategy
        strategy.require(Feature.CLIP_GRAD_VALUE, what)
        optimizers = self._scaled_optimizers(what)
        self._normalize_gradients()
        strategy.stepper.clip_grad_value(parameters, clip_value, optimizers=optimizers)

    def unscale_gradients(self, optimizer: Optimizer | Sequence[Optimizer] | None = None) -> None:
        """Divide gradients by the loss scale; only float16 has one.

        Args:
            optimizer: The optimizer, or optimizers, of these gradients; all prepared ones if `None`.

        Raises:
            RuntimeError: A scaled loss is being accumulated, so the gradients are incomplete.
        """
        known = self._scaled_optimizers("unscale_gradients()")
        self._normalize_gradients()
        if optimizer is not None:
            listed: Sequence[Any] = [optimizer] if isinstance(optimizer, Optimizer) else optimizer
            known = [without_wrapper(wrapped) for wrapped in listed]
        self._parts.precision.unscale(known)

    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
        """Run the block under autocast, in the mixed precision of the run.

        Args:
            autocast_handler: Options for this block; those of the accelerator if `None`.

        Raises:
            TypeError: `autocast_handler` has another type.
        """
        if not isinstance(autocast_handler, AutocastKwargs | None):
            raise TypeError(f"autocast({autocast_handler!r}): expected AutocastKwargs(enabled=…).")
        return self._parts.precision.autocast(autocast_handler)

    @property
    def mixed_precision(self) -> str:
        """`"no"`, `"fp16"`, `"bf16"` or `"fp8"`."""
        return self._parts.precision.name if self._parts.converter is None else "fp8"

    @property
    def native_amp(self) -> bool:
        """Whether forward passes run in mixed precision by torch's autocast."""
        if self._parts.native_amp is not None:
            return self._parts.native_amp
        fp16 = self.mixed_precision == "fp16" and self._parts.process.device.type != "cpu"
        return fp16 or self.mixed_precision == "bf16"

    @native_amp.setter
    def native_amp(self, native_amp: bool) -> None:
        precision = switch_autocast(self._parts.precision, native_amp)
        self._assign(native_amp=native_amp, precision=precision)

    @property
    def scaler(self) -> GradScaler | None:
        """The loss scaler, with float16."""
        return self._parts.precision.scaler

    @scaler.setter
    def scaler(self, scaler: GradScaler | None) -> None:
        switch_scaler(self._parts.precision, scaler)

    @property
    def autocast_handler(self) -> AutocastKwargs | None:
        """The `AutocastKwargs` of the accelerator."""
        return self._handler(AutocastKwargs)

    @autocast_handler.setter
    def autocast_handler(self, handler: AutocastKwargs | None) -> None:
        self._parts.handlers[AutocastKwargs] = handler
        self._assign(precision=with_autocast_options(self._parts.precision, handler))

    @property
    def scaler_handler(self) -> GradScalerKwargs | None:
        """The `GradScalerKwargs` of the accelerator."""
        return self._handler(GradScalerKwargs)

    @scaler_handler.setter
    def scaler_handler(self, handler: GradScalerKwargs | None) -> None:
        self._parts.handlers[GradScalerKwargs] = handler

    @property
    def ddp_handler(self) -> DistributedDataParallelKwargs | None:
        """The `DistributedDataParallelKwargs` of the accelerator; `prepare` reads them."""
        return self._handler(DistributedDataParallelKwargs)

    @ddp_handler.setter
    def ddp_handler(self, handler: DistributedDataParallelKwargs | None) -> None:
        self._parts.handlers[DistributedDataParallelKwargs] = handler

    @property
    def init_handler(self) -> InitProcessGroupKwargs | None:
        """The `InitProcessGroupKwargs` of the accelerator."""
        return self._handler(InitProcessGroupKwargs)

    @init_handler.setter
    def init_handler(self, handler: InitProcessGroupKwargs | None) -> None:
        self._parts.handlers[InitProcessGroupKwargs] = handler

    @property
    def ao_recipe_handler(self) -> AORecipeKwargs | None:
        """The `AORecipeKwargs` of the accelerator."""
        return self._handler(AORecipeKwargs)

    @ao_recipe_handler.setter
    def ao_recipe_handler(self, handler: AORecipeKwargs | None) -> None:
        self._set_recipe(self.ao_recipe_handler, handler)

    @property
    def te_recipe_handler(self) -> TERecipeKwargs | None:
        """The `TERecipeKwargs` of the accelerator."""
        return self._handler(TERecipeKwargs)

    @te_recipe_handler.setter
    def te_recipe_handler(self, handler: TERecipeKwargs | None) -> None:
        self._set_recipe(self.te_recipe_handler, handler)

    @property
    def msamp_recipe_handler(self) -> MSAMPRecipeKwargs | None:
        """The `MSAMPRecipeKwargs` of the accelerator."""
        return self._handler(MSAMPRecipeKwargs)

    @msamp_recipe_handler.setter
    def msamp_recipe_handler(self, handler: MSAMPRecipeKwargs | None) -> None:
        self._set_recipe(self.msamp_recipe_handler, handler)

    @property
    def fp8_recipe_handler(self) -> AORecipeKwargs | TERecipeKwargs | MSAMPRecipeKwargs | None:
        """The FP8 recipe, if any; a change applies to models prepared later."""
        return self.ao_recipe_handler or self.te_recipe_handler or self.msamp_recipe_handler

    @fp8_recipe_handler.setter
    def fp8_recipe_handler(self, handler: AORecipeKwargs | TERecipeKwargs | MSAMPRecipeKwargs | None) -> None:
        self._set_recipe(self.fp8_recipe_handler, handler)

    @property
    def gradient_state(self) -> GradientState:
        """Whether gradients are synchronised, and which loader is active."""
        return self._parts.synchronizer.state

    @gradient_state.setter
    def gradient_state(self, gradient_state: GradientState) -> None:
        self._assign(gradient_state=gradient_state)

    @property
    def sync_gradients(self) -> bool:
        """Whether gradients are synchronised now, so that optimizers step."""
        return self.gradient_state.sync_gradients

    @sync_gradients.setter
    def sync_gradients(self, sync_gradients: bool) -> None:
        self.gradient_state.sync_gradients = sync_gradients

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches that make one optimizer step."""
        return self.gradient_state.num_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, gradient_accumulation_steps: int) -> None:
        state = self.gradient_state
        plugin = GradientAccumulationPlugin(num_steps=gradient_accumulation_steps)  # rejects invalid counts
        state.plugin_kwargs = {**state.plugin_kwargs, **plugin.to_kwargs()}
        state.num_steps = gradient_accumulation_steps

    @property
    def step(self) -> int:
        """Micro-batches since the last optimizer step."""
        return self._parts.synchronizer.step

    @step.setter
    def step(self, step: int) -> None:
        self._parts.synchronizer.step = step

    @property
    def step_scheduler_with_optimizer(self) -> bool:
        """Whether schedulers follow their optimizers; a change applies to schedulers prepared later."""
        return self._parts.step_scheduler_with_optimizer

    @step_scheduler_with_optimizer.setter
    def step_scheduler_with_optimizer(self, step_with_optimizer: bool) -> None:
        self._assign(step_scheduler_with_optimizer=step_with_optimizer)

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether a prepared optimizer skipped its last step because gradients were not finite."""
        return any(optimizer.step_was_skipped for optimizer in self._parts.prepared.optimizers)

    def _set_recipe(self, before: KwargsHandler | None, after: KwargsHandler | None) -> None:
        if after is not before:
            self._parts = with_recipe_handler(self._parts, after)

    def _backward_of_items(self, loss: Tensor, num_items: ItemCount, kwargs: dict[str, Any]) -> None:
        parts = self._parts
        parts.strategy.require(Feature.ITEM_COUNTS, "backward(num_items=…)")
        sync = parts.gradient_state.sync_gradients
        parts.items.add(num_items)
        parts.backward(loss, accumulation=1, sync=sync, **kwargs)
        if sync and not parts.items.is_held:
            parts.items.normalize()

    def _normalize_gradients(self) -> None:
        """Normalize the gradients of a window that was not completed by `accumulate`."""
        if self._parts.gradient_state.sync_gradients:
            self._parts.items.normalize()

    def _scaled_optimizers(self, what: str) -> list[Optimizer]:
        parts = self._parts
        if parts.precision.scaler is not None and not parts.gradient_state.sync_gradients:
            raise RuntimeError(
                f"{what} was called while gradients are being accumulated: they are still scaled and "
                "incomplete. Call it only"
                " `if accelerator.sync_gradients:`."
            )
        return [optimizer.optimizer for optimizer in parts.prepared.optimizers]


def _check_parameters(parameters: object, name: str) -> None:
    if not isinstance(parameters, Iterable):  # a tensor is iterable, too
        raise TypeError(
            f"{name}({parameters!r}, …): expected one or more tensors, such as model.parameters()."
        )
