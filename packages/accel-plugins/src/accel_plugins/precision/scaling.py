"""Loss scaling that keeps count of several optimizers, also of gradients of which every rank has a part."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, final
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch.amp.grad_scaler import GradScaler

from accel_ops.dtensors import local_part
from accel_state import hang_monitor
from accel_state.errors import SettingsError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor
    from torch.optim import Optimizer

    from accel_plugins.roles import StateDict

logger = logging.getLogger(__name__)


@final
class LossScaling:
    """A `GradScaler` that is updated once per iteration, however many optimizers step in it.

    All gradients of an iteration were made with one scale, so that it must not change between the steps of
    two optimizers: it is updated when all known optimizers have stepped, or else before the next loss. With
    `master_weights`, parameters in float16 are put into float32 when they are wrapped.
    """

    def __init__(self, scaler: GradScaler, *, master_weights: bool = False) -> None:
        self.scaler = scaler
        self._master_weights = master_weights
        self._optimizers: WeakSet[Optimizer] = WeakSet()
        self._unscaled: WeakSet[Optimizer] = WeakSet()
        self._stepped: WeakSet[Optimizer] = WeakSet()
        # What the gradients of unscaled optimizers were when a later loss was scaled.
        self._versions: WeakKeyDictionary[Optimizer, tuple[tuple[int, int], ...]] = WeakKeyDictionary()

    def add(self, optimizers: Iterable[Optimizer]) -> None:
        """Add optimizers, whose steps an update waits for; the dtypes of their parameters are checked now."""
        for optimizer in optimizers:
            if self.scaler.is_enabled() and not self._master_weights and _has_half_parameters(optimizer):
                raise SettingsError(
                    f"{type(optimizer).__qualname__} trains parameters in float16 with "
                    "mixed_precision='fp16', whose loss scaling needs them in float32. Load the model in "
                    "float32; or keep it, in bfloat16 rather than float16, and use mixed_precision='no'."
                )
            self._optimizers.add(optimizer)

    def scale(self, loss: Tensor) -> Tensor:
        """Multiply the loss by the scale."""
        if self._stepped:
            self._update()
        elif self._unscaled:
            self._start_window_without_step()
        return self.scaler.scale(loss)

    def unscale(self, optimizers: Iterable[Optimizer]) -> None:
        """Divide the gradients of optimizers by the scale, unless that was done since the last update."""
        if not self.scaler.is_enabled():
            return
        for optimizer in optimizers:
            if optimizer in self._unscaled:
                self._check_unmixed(optimizer)
            elif _has_gradients(optimizer):
                self.scaler.unscale_(optimizer)
                self._unscaled.add(optimizer)

    def step(self, optimizer: Optimizer, closure: Callable[[], float] | None = None) -> bool | Tensor:
        """Step unless a gradient is not finite.

        Returns:
            Whether it stepped. Fused optimizers decide that in their kernel: for them it is a 0-d tensor on
            the device, so that only those who ask for its value wait.
        """
        if not self.scaler.is_enabled() or not _has_gradients(optimizer):
            return step_unscaled(optimizer, closure)
        if closure is not None:
            raise UnsupportedError(
                f"{type(optimizer).__name__}.step(closure) cannot be combined with the loss scaling of "
                "mixed_precision='fp16'; use 'bf16' or 'no'."
            )
        if optimizer in self._stepped:
            raise RuntimeError(
                f"{type(optimizer).__name__}.step() was called twice for one loss; "
                "call accelerator.backward() in between."
            )
        if optimizer not in self._optimizers:
            self.add([optimizer])
        is_fused = getattr(optimizer, "_step_supports_amp_scaling", False)  # as GradScaler itself asks
        stepped = self._step_fused(optimizer) if is_fused else self._step_unless_infinite(optimizer)
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
        """Resume; without a state, as of a run in another precision, begin anew with a warning."""
        if state:
            self.scaler.load_state_dict(state)
        elif self.scaler.is_enabled():
            logger.warning(
                "The checkpoint has no state of a loss scaler: scaling begins anew at %s.",
                self.scaler.get_scale(),
            )

    def _step_fused(self, optimizer: Optimizer) -> Tensor:
        if optimizer in self._unscaled:
            self._check_unmixed(optimizer)
        self.scaler.step(optimizer)
        flags = self._infinite(optimizer)
        found = flags[0]
        for flag in flags[1:]:
            found = torch.maximum(found, flag.to(found.device))
        return found == 0

    def _step_unless_infinite(self, optimizer: Optimizer) -> bool:
        # As GradScaler.step, which keeps to itself whether it stepped: to ask the device a second time would
        # wait for the kernels of the step.
        self.unscale([optimizer])
        if any(flag.item() for flag in self._infinite(optimizer)):
            return False
        return step_unscaled(optimizer)

    def _infinite(self, optimizer: Optimizer) -> list[Tensor]:
        return [*self.scaler._found_inf_per_device(optimizer).values()]  # pyright: ignore[reportPrivateUsage]

    def _start_window_without_step(self) -> None:
        """A loss follows gradients that were unscaled, as for clipping, and have made no step.

        If they are gone, the step was left out. If not, they may still make it, as those of one optimizer of
        several with a loss each do; unless the loss's own gradients are added to them.
        """
        if not any(_has_gradients(optimizer) for optimizer in self._unscaled):
            self._update()
            return
        for optimizer in self._unscaled:
            self._versions.setdefault(optimizer, _versions(optimizer))

    def _check_unmixed(self, optimizer: Optimizer) -> None:
        if self._versions.pop(optimizer, None) not in {None, _versions(optimizer)}:
            raise RuntimeError(
                f"The gradients of {type(optimizer).__name__} were unscaled, as for clipping, and a "
                "later backward pass has added scaled ones. Call optimizer.step(), or leave it out and "
                "call optimizer.zero_grad(set_to_none=True), before the next accelerator.backward()."
            )

    def _update(self) -> None:
        self.scaler.update()
        self._stepped.clear()
        self._unscaled.clear()
        self._versions.clear()


def step_unscaled(optimizer: Optimizer, closure: Callable[[], float] | None = None) -> bool:
    """Step an optimizer; return True."""
    if closure is None:  # some optimizers take no closure at all
        optimizer.step()
    else:
        optimizer.step(closure)
    return True


def warn_unused_scaler_state(state: StateDict, name: str) -> None:
    """Warn that a loss scaler's state cannot be used by a policy without one."""
    if state:
        logger.warning(
            "The checkpoint holds the state of a loss scaler, which mixed_precision=%r does not have: "
            "it is not used.",
            name,
        )


def _has_half_parameters(optimizer: Optimizer) -> bool:
    return any(
        p.dtype is torch.float16 and p.requires_grad
        for group in optimizer.param_groups
        for p in group["params"]
    )


def _has_gradients(optimizer: Optimizer) -> bool:
    return any(p.grad is not None for group in optimizer.param_groups for p in group["params"])


def _versions(optimizer: Optimizer) -> tuple[tuple[int, int], ...]:
    gradients = (p.grad for group in optimizer.param_groups for p in group["params"])
    return tuple((id(one), one._version) for one in gradients if one is not None)


class ShardedGradScaler(GradScaler):
    """A `GradScaler` that skips a step on every rank if any rank has a gradient that is not finite.

    Gradients may be ordinary tensors and DTensors on several meshes, on the device and on the CPU.
    """

    def _unscale_grads_(
        self,
        optimizer: Optimizer,
        inv_scale: Tensor,
        found_inf: Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, Tensor]:
        """Divide this rank's parts of the gradients; torch calls it once per step."""
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
            torch._amp_foreach_non_finite_check_and_unscale_(parts, flag, inv_scale.to(device))  # pyright: ignore[reportPrivateImportUsage, reportPrivateUsage] - as GradScaler itself
            worst = torch.maximum(worst, flag.to(worst.device))
        if dist.is_initialized():
            with hang_monitor.collective_scope("all_reduce of the loss scaler"):
                dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        # Also where this rank has a part of no gradient: GradScaler wants one flag at least.
        return {device: worst.to(device) for device in {worst.device, *(device for device, _ in groups)}}


def get_fsdp2_grad_scaler(**kwargs: Any) -> GradScaler:
    """Make the loss scaler for models that FSDP2 has sharded.

    Args:
        **kwargs: As of `torch.amp.GradScaler`.

    Example:
        >>> get_fsdp2_grad_scaler(device="cpu", init_scale=8.0).get_scale()
        8.0
    """
    return ShardedGradScaler(**kwargs)
