"""Precision policies: autocast around models, conversion of their results, and loss scaling for fp16."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, final
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from accel_ops.modules import has_wrapped_forward, replace_forward
from accel_ops.tree import convert_to_fp32, local_part, recursively_apply
from accel_plugins.kwargs import AutocastKwargs, GradScalerKwargs
from accel_state import hang_monitor
from accel_state.accelerator_state import AcceleratorState
from accel_state.errors import SettingsError, UnsupportedError
from accel_state.labels import DistributedType, has_sharded_gradients
from accel_state.partial_state import PartialState

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from accel_plugins.step_guard import GuardedSteps
    from accel_plugins.strategy import Bundle, StateDict

logger = logging.getLogger(__name__)

DTYPES: Mapping[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""The dtype that models compute in, by the name of a mixed precision."""


def build_precision(
    name: str,
    device: torch.device,
    autocast_kwargs: AutocastKwargs | None = None,
    scaler_kwargs: GradScalerKwargs | None = None,
    *,
    shared: bool = False,
    master_weights: bool = False,
) -> PrecisionPolicy:
    """Build the precision policy of a run.

    Args:
        name: `"no"`, `"bf16"` or `"fp16"`.
        device: The device on which models compute.
        autocast_kwargs: Options of autocast; not used by `"no"`.
        scaler_kwargs: Options of the loss scaler; used only by `"fp16"`.
        shared: Whether ranks have shards of the gradients, and decide together whether all are finite.
        master_weights: Whether the strategy puts trained parameters into float32.

    Raises:
        SettingsError: The precision is unknown.
        UnsupportedError: The device has no autocast, or the precision is not available.

    Example:
        >>> policy = build_precision("bf16", torch.device("cpu"))
        >>> with policy.autocast():
        ...     (torch.ones(2, 2) @ torch.ones(2, 2)).dtype
        torch.bfloat16
    """
    if name == "no":
        return PrecisionPolicy("no", device.type)
    if name not in DTYPES:
        raise SettingsError(f"mixed_precision={name!r}: expected one of {['no', *DTYPES]}.")
    if not torch.amp.is_autocast_available(device.type):
        raise UnsupportedError(
            f"mixed_precision={name!r}: torch has no autocast for devices of type {device.type!r}. Use 'no'."
        )
    scaling = None
    if name == "fp16":
        kind = ShardedGradScaler if shared else GradScaler
        scaler = kind(device.type, **(scaler_kwargs or GradScalerKwargs()).to_kwargs())
        scaling = LossScaling(scaler, master_weights=master_weights)
    options = (autocast_kwargs or AutocastKwargs()).to_kwargs()
    return PrecisionPolicy(name, device.type, dtype=DTYPES[name], options=options, scaling=scaling)


def step_unscaled(optimizer: Optimizer, closure: Callable[[], float] | None = None) -> bool:
    """Step, and return True: the step of policies without a loss scaler."""
    if closure is None:  # some optimizers have a step without arguments
        optimizer.step()
    else:
        optimizer.step(closure)
    return True


def decides_on_device(optimizer: Optimizer) -> bool:
    """Return whether the optimizer's kernel can skip its next step by a flag on the device, as fused ones do.

    A momentum has to exist: torch's fused SGD would keep uninitialised memory after a skipped first step.
    """
    return getattr(optimizer, "_step_supports_amp_scaling", False) and not any(
        group.get("momentum")
        and parameter.grad is not None
        and optimizer.state.get(parameter, {}).get("momentum_buffer") is None
        for group in optimizer.param_groups
        for parameter in group["params"]
    )


class PrecisionPolicy:
    """Decides in which dtype models compute, and scales losses where the dtype needs it.

    Parameters are unchanged.

    Args:
        name: `"no"`, `"fp16"`, `"bf16"` or `"fp8"`.
        device_type: The type of the device on which models compute.
        dtype: Operations run in this dtype; `None`: models compute in their own dtypes.
        options: Options of autocast.
        scaling: The loss scaling, or what guards the steps of other precisions, if any.

    Attributes:
        step: Called with an optimizer, and a closure or `None`: unscales if necessary, and steps; returns
            False if gradients were not finite and nothing was done. Where the device decides, as for fused
            optimizers, the result is a 0-d tensor on the device.
    """

    def __init__(
        self,
        name: str,
        device_type: str,
        *,
        dtype: torch.dtype | None = None,
        options: Mapping[str, Any] | None = None,
        scaling: LossScaling | GuardedSteps | None = None,
    ) -> None:
        self.name, self.device_type = name, device_type
        self.dtype, self.options, self.scaling = dtype, options or {}, scaling
        self.step: Callable[..., bool | Tensor] = step_unscaled if scaling is None else scaling.step

    @property
    def scaler(self) -> GradScaler | None:
        """The loss scaler, if any; `None` if neither it nor autocast is enabled."""
        scaling = self.scaling if isinstance(self.scaling, LossScaling) else None
        if scaling is None or (self.dtype is None and not scaling.scaler.is_enabled()):
            return None
        return scaling.scaler

    def autocast(self, kwargs: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
        """Return a new context in which operations run in the policy's dtype; `kwargs` replace options.

        Without a 16-bit dtype it does nothing, or disables an enclosing autocast if `kwargs` do.
        """
        if self.dtype is not None:
            options = self.options if kwargs is None else kwargs.to_kwargs()
            return torch.autocast(self.device_type, self.dtype, **options)
        if kwargs is None or kwargs.enabled:
            return nullcontext()
        return torch.autocast(self.device_type, enabled=False)

    def convert(self, bundle: Bundle) -> Bundle:
        """Make the models compute in this format and return float32; names in state dicts do not change.

        Called once per `prepare`, before the strategy wraps. Optimizers in the bundle become known to
        the loss scaler.
        """
        for model in () if self.dtype is None else bundle.models:
            if not has_wrapped_forward(model):
                replace_forward(model, self._call)
        if isinstance(self.scaling, LossScaling):
            self.scaling.add(bundle.optimizers)
        return bundle

    def _call(self, forward: Callable[..., Any], model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with self.autocast():
            result = forward(model, *args, **kwargs)
        return convert_to_fp32(result)

    def scale(self, loss: Tensor) -> Tensor:
        """Return the scaled loss, to call `backward` on."""
        return loss if self.scaling is None else self.scaling.scale(loss)

    def unscale(self, optimizers: Iterable[Optimizer]) -> None:
        """Divide the gradients of these optimizers by the scale, once per step however often it is called."""
        if self.scaling is not None:
            self.scaling.unscale(optimizers)

    def state_dict(self) -> StateDict:
        """Return the state needed to resume; empty without a loss scaler."""
        return self.scaling.state_dict() if isinstance(self.scaling, LossScaling) else {}

    def load_state_dict(self, state: StateDict) -> None:
        """Resume from a `state_dict`; warn of one that this policy cannot use."""
        if isinstance(self.scaling, LossScaling):
            self.scaling.load_state_dict(state)
        elif state:
            logger.warning(
                "The checkpoint holds the state of a loss scaler, which mixed_precision=%r does not have: "
                "it is not used.",
                self.name,
            )


class EnginePrecision(PrecisionPolicy):
    """The policy of engines that cast models themselves.

    Such models take inputs of any floating dtype, and return float32. An engine unscales when it steps.

    Args:
        name: `"no"`, `"bf16"` or `"fp16"`.
        device_type: The type of the device on which models compute.
        read_scale: Returns the state of the engine's loss scale, unless the engine's own files have it.
        write_scale: Restores that state.
    """

    def __init__(
        self,
        name: str,
        device_type: str,
        read_scale: Callable[[], StateDict] = dict,
        write_scale: Callable[[StateDict], None] = lambda _: None,
    ) -> None:
        super().__init__(name, device_type, dtype=DTYPES.get(name))
        self.state_dict = read_scale
        self.load_state_dict = write_scale  # pyright: ignore[reportAttributeAccessIssue] - of one argument

    def _call(self, forward: Callable[..., Any], model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        dtype = DTYPES[self.name]
        dtypes = (p.dtype for p in model.parameters() if p.is_floating_point())
        if next(dtypes, None) is not dtype:  # no engine has cast the model, as in evaluation
            return super()._call(forward, model, *args, **kwargs)
        args, kwargs = recursively_apply(
            lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, (args, kwargs)
        )
        return convert_to_fp32(forward(model, *args, **kwargs))


def compute_in_float32(precision: PrecisionPolicy) -> PrecisionPolicy:
    """Return a policy of the same name without autocast, and without loss scaling until a scaler is assigned.

    Example:
        >>> policy = compute_in_float32(build_precision("fp16", torch.device("cpu")))
        >>> policy.name, policy.scaler
        ('fp16', None)
    """
    scaling = LossScaling(GradScaler(enabled=False))
    return PrecisionPolicy(precision.name, precision.device_type, scaling=scaling)


def switch_autocast(precision: PrecisionPolicy, casts: bool) -> PrecisionPolicy:
    """Switch a policy's autocast on or off; the policy of an engine that casts models stays as it is.

    Example:
        >>> policy = switch_autocast(build_precision("bf16", torch.device("cpu")), False)
        >>> with policy.autocast():
        ...     (torch.ones(2, 2) @ torch.ones(2, 2)).dtype
        torch.float32
    """
    if isinstance(precision, EnginePrecision):
        return precision
    changed = copy.copy(precision)
    own = DTYPES.get(precision.name)
    changed.dtype = (own or torch.get_autocast_dtype(precision.device_type)) if casts else None
    return changed


def with_autocast_options(precision: PrecisionPolicy, options: AutocastKwargs | None) -> PrecisionPolicy:
    """Return a policy with other options of autocast; that of an engine stays as it is."""
    changed = copy.copy(precision)
    if not isinstance(changed, EnginePrecision):
        changed.options = (options or AutocastKwargs()).to_kwargs()
    return changed


def switch_scaler(precision: PrecisionPolicy, scaler: GradScaler | None) -> None:
    """Set the scaler of a policy with loss scaling, or remove it.

    Raises:
        SettingsError: The policy has no loss scaling.
    """
    if isinstance(precision.scaling, LossScaling):
        precision.scaling.scaler = GradScaler(enabled=False) if scaler is None else scaler
    elif scaler is not None:
        raise SettingsError(
            f"accelerator.scaler = {scaler!r}: losses are scaled with mixed_precision='fp16' alone, and "
            f"it is {precision.name!r}."
        )


@final
class LossScaling:
    """A `GradScaler` that is updated once per iteration, however many optimizers step in it.

    All gradients of an iteration have the same scale, which must not change between the steps of two
    optimizers: it is updated when all known optimizers have stepped, or else before the next loss. With
    `master_weights`, float16 parameters are converted to float32 when models are wrapped.
    """

    def __init__(self, scaler: GradScaler, *, master_weights: bool = False) -> None:
        self.scaler = scaler
        self._master_weights = master_weights
        self._optimizers: WeakSet[Optimizer] = WeakSet()
        self._checked: WeakSet[Optimizer] = WeakSet()
        self._unscaled: WeakSet[Optimizer] = WeakSet()
        self._stepped: WeakSet[Optimizer] = WeakSet()
        # The versions of the gradients of unscaled optimizers when a later loss was scaled.
        self._versions: WeakKeyDictionary[Optimizer, tuple[tuple[int, int], ...]] = WeakKeyDictionary()

    def add(self, optimizers: Iterable[Optimizer]) -> None:
        """Add optimizers; the scale is updated once all of them have stepped."""
        self._optimizers.update(optimizers)

    def _check_dtypes(self, optimizer: Optimizer) -> None:
        """Refuse gradients in float16, unless a program unscales them by its own function."""
        if optimizer in self._checked or self._master_weights or "_unscale_grads_" in vars(self.scaler):
            return
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        if any(p.dtype is torch.float16 and p.requires_grad for p in parameters):
            raise SettingsError(
                f"{type(optimizer).__qualname__} trains parameters in float16 with mixed_precision='fp16', "
                "which needs float32. Load the model in float32, or in bfloat16 with mixed_precision='no'."
            )
        self._checked.add(optimizer)

    def scale(self, loss: Tensor) -> Tensor:
        """Multiply the loss by the scale."""
        if self._stepped:
            self._update()
        elif self._unscaled:
            # Gradients were unscaled, as for clipping, but not stepped. If they were cleared, the step was
            # skipped. Otherwise it may still come, as where each optimizer has its own loss, unless the new
            # loss's gradients are added to them.
            if any(_has_gradients(optimizer) for optimizer in self._unscaled):
                for optimizer in self._unscaled:
                    self._versions.setdefault(optimizer, _versions(optimizer))
            else:
                self._update()
        return self.scaler.scale(loss)

    def unscale(self, optimizers: Iterable[Optimizer]) -> None:
        """Divide the gradients of optimizers by the scale, unless that was done since the last update."""
        if not self.scaler.is_enabled():
            return
        for optimizer in optimizers:
            if optimizer in self._unscaled:
                self._check_unmixed(optimizer)
            elif self._takes_part(optimizer):
                self._check_dtypes(optimizer)
                self.scaler.unscale_(optimizer)
                self._unscaled.add(optimizer)

    def step(self, optimizer: Optimizer, closure: Callable[[], float] | None = None) -> bool | Tensor:
        """Step unless a gradient is not finite.

        Returns:
            Whether it stepped. Fused optimizers decide that in their kernel: for them it is a 0-d tensor on
            the device, so that only reading its value synchronises.
        """
        if not self.scaler.is_enabled() or not self._takes_part(optimizer):
            return step_unscaled(optimizer, closure)
        if closure is not None:
            raise UnsupportedError(
                f"{type(optimizer).__name__}.step(closure) cannot be combined with the loss scaling of "
                "mixed_precision='fp16'; use 'bf16' or 'no'."
            )
        if optimizer in self._stepped:
            name = type(optimizer).__name__
            raise RuntimeError(f"{name}.step() was called twice for one loss. Call backward() in between.")
        self._optimizers.add(optimizer)
        if decides_on_device(optimizer):
            self._check_dtypes(optimizer)
            if optimizer in self._unscaled:
                self._check_unmixed(optimizer)
            self.scaler.step(optimizer)
            worst, *flags = _infinite_flags(self.scaler, optimizer)
            for flag in flags:
                worst = torch.maximum(worst, flag.to(worst.device))
            stepped = worst == 0
        else:
            # GradScaler.step does the same without returning whether it stepped; asking the device afterwards
            # would wait for the kernels of the step.
            self.unscale([optimizer])
            is_infinite = any(flag.item() for flag in _infinite_flags(self.scaler, optimizer))
            stepped = not is_infinite and step_unscaled(optimizer)
        self._stepped.add(optimizer)
        if len(self._stepped) == len(self._optimizers):
            self._update()
        return stepped

    def state_dict(self) -> StateDict:
        """Return the state of the scaler between two iterations."""
        if self._stepped:
            self._update()
        return self.scaler.state_dict()

    def load_state_dict(self, state: StateDict) -> None:
        if state:
            self.scaler.load_state_dict(state)
        elif self.scaler.is_enabled():
            logger.warning(
                "The checkpoint has no state of a loss scaler: scaling restarts at %s.",
                self.scaler.get_scale(),
            )

    def _takes_part(self, optimizer: Optimizer) -> bool:
        """Return whether this rank has gradients or, if ranks decide together, another rank may have some."""
        if not isinstance(self.scaler, ShardedGradScaler):
            return _has_gradients(optimizer)
        # torch creates the scale at the first loss: not every pipeline stage has a loss.
        self.scaler.scale(torch.zeros((), device=self.scaler._device))
        return True

    def _check_unmixed(self, optimizer: Optimizer) -> None:
        if self._versions.pop(optimizer, None) not in {None, _versions(optimizer)}:
            raise RuntimeError(
                f"The gradients of {type(optimizer).__name__} were unscaled, as for clipping, and a "
                "later backward pass has added scaled ones. Call optimizer.step(), or leave it out and "
                "call optimizer.zero_grad(set_to_none=True), before the next accelerator.backward()."
            )

    def _update(self) -> None:
        # Whoever abandons a step, as when a replica group has failed, has updated the scaler.
        if any(_infinite_flags(self.scaler, optimizer) for optimizer in {*self._unscaled, *self._stepped}):
            self.scaler.update()
        self._stepped.clear()
        self._unscaled.clear()
        self._versions.clear()


def _has_gradients(optimizer: Optimizer) -> bool:
    return any(p.grad is not None for group in optimizer.param_groups for p in group["params"])


def _infinite_flags(scaler: Any, optimizer: Optimizer) -> list[Tensor]:
    """Return the scaler's flags, one per device, of non-finite gradients."""
    return [*scaler._found_inf_per_device(optimizer).values()]


def _versions(optimizer: Optimizer) -> tuple[tuple[int, int], ...]:
    gradients = (p.grad for group in optimizer.param_groups for p in group["params"])
    return tuple((id(gradient), gradient._version) for gradient in gradients if gradient is not None)


class ShardedGradScaler(GradScaler):
    """A `GradScaler` that skips a step on every rank if any rank has a gradient that is not finite.

    Gradients may be ordinary tensors and DTensors on several meshes, on the device and on the CPU. A rank may
    have none, as for a frozen pipeline stage.
    """

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """Divide this rank's shards of the gradients; torch calls it once per step."""
        del allow_fp16
        groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    part = local_part(parameter.grad)
                    groups.setdefault((part.device, part.dtype), []).append(part)
        worst = found_inf.clone()
        for (device, _), parts in groups.items():
            flag = found_inf.to(device, copy=True)
            torch._amp_foreach_non_finite_check_and_unscale_(parts, flag, inv_scale.to(device))
            worst = torch.maximum(worst, flag.to(worst.device))
        if dist.is_initialized():
            with hang_monitor.collective_scope("all_reduce of the loss scaler"):
                dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        # GradScaler needs a flag also on a rank without any gradient.
        return {device: worst.to(device) for device in {worst.device, *(device for device, _ in groups)}}


def get_fsdp2_grad_scaler(**kwargs: Any) -> GradScaler:
    """Build a loss scaler for models sharded by FSDP2.

    Args:
        **kwargs: Arguments of `torch.amp.GradScaler`.

    Example:
        >>> get_fsdp2_grad_scaler(device="cpu", init_scale=8.0).get_scale()
        8.0
    """
    return ShardedGradScaler(**kwargs)


def get_mixed_precision_context_manager(
    native_amp: bool = False, autocast_kwargs: AutocastKwargs | None = None
) -> AbstractContextManager[Any]:
    """Return a context in which operations run in the mixed precision of this process.

    Args:
        native_amp: Whether mixed precision is wanted; without it the context does nothing.
        autocast_kwargs: Options of autocast.

    Example:
        >>> with get_mixed_precision_context_manager():
        ...     pass
    """
    if not native_amp:
        return nullcontext()
    state = AcceleratorState()
    return build_precision(state.mixed_precision, state.device, autocast_kwargs).autocast()


def get_grad_scaler(distributed_type: DistributedType | str | None = None, **kwargs: Any) -> GradScaler:
    """Build a loss scaler for the device of this process.

    Args:
        distributed_type: How models are trained; where each rank has shards of the gradients, all skip a step
            together.
        **kwargs: Fields of `GradScalerKwargs`.

    Example:
        >>> get_grad_scaler(enabled=False).is_enabled()
        False
    """
    kind = ShardedGradScaler if has_sharded_gradients(distributed_type) else GradScaler
    return kind(PartialState().device.type, **GradScalerKwargs(**kwargs).to_kwargs())
