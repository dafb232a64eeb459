"""Mixed precision: by autocast, with loss scaling for float16; of an engine; or none."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch

from accel_ops.modules import wrap_forward
from accel_ops.precision import convert_to_fp32
from accel_ops.tree import recursively_apply
from accel_plugins.precision.scaling import LossScaling, step_unscaled, warn_unused_scaler_state

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from contextlib import AbstractContextManager

    from torch import Tensor, nn
    from torch.amp.grad_scaler import GradScaler
    from torch.optim import Optimizer

    from accel_plugins.bundle import Bundle
    from accel_plugins.kwargs.amp import AutocastKwargs
    from accel_plugins.roles import StateDict


DTYPES: Mapping[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""What models compute in, by the name of a mixed precision."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedPrecision:
    """The policies `"bf16"` and `"fp16"`: parameters stay as they are, operations run in `dtype`."""

    name: str
    dtype: torch.dtype
    device_type: str
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    scaling: LossScaling | None = None

    @property
    def scaler(self) -> GradScaler | None:
        """The loss scaler, if there is one."""
        return None if self.scaling is None else self.scaling.scaler

    def autocast(self, kwargs: AutocastKwargs | None = None) -> torch.autocast:
        """A fresh autocast context; `kwargs` replace the policy's own options."""
        options = self.options if kwargs is None else kwargs.to_kwargs()
        return torch.autocast(self.device_type, self.dtype, **options)

    def convert(self, bundle: Bundle) -> Bundle:
        """Put autocast, and the conversion of its results to float32, around every model's `forward`."""
        for model in bundle.models:
            wrap_forward(model, self._around)
        if self.scaling is not None:
            self.scaling.add(bundle.optimizers)
        return bundle

    def scale(self, loss: Tensor) -> Tensor:
        """The loss times the scale, if there is one."""
        return loss if self.scaling is None else self.scaling.scale(loss)

    def unscale(self, optimizers: Iterable[Optimizer]) -> None:
        """Divide the gradients of optimizers by the scale, once per step."""
        if self.scaling is not None:
            self.scaling.unscale(optimizers)

    def step(self, optimizer: Optimizer, closure: Callable[[], float] | None = None) -> bool | Tensor:
        """Step; return False if gradients were not finite and nothing was done."""
        if self.scaling is None:
            return step_unscaled(optimizer, closure)
        return self.scaling.step(optimizer, closure)

    def state_dict(self) -> StateDict:
        """The loss scaler's state; empty without one."""
        return {} if self.scaling is None else self.scaling.state_dict()

    def load_state_dict(self, state: StateDict) -> None:
        """Resume from a state."""
        if self.scaling is None:
            warn_unused_scaler_state(state, self.name)
        else:
            self.scaling.load_state_dict(state)

    def _around(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(forward)
        def mixed(*args: Any, **kwargs: Any) -> Any:
            with self.autocast():
                result = forward(*args, **kwargs)
            return convert_to_fp32(result)

        return mixed


@dataclass(frozen=True, slots=True, kw_only=True)
class FullPrecision:
    """The policy `"no"`: no autocast, no loss scaling."""

    device_type: str
    name: str = "no"
    scaler: None = None

    def autocast(self, kwargs: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
        """A context that changes nothing, or that switches off an autocast around it if `kwargs` say so."""
        if kwargs is None or kwargs.enabled:
            return nullcontext()
        return torch.autocast(self.device_type, enabled=False)

    def convert(self, bundle: Bundle) -> Bundle:
        """Return the bundle."""
        return bundle

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss."""
        return loss

    def unscale(self, optimizers: Iterable[Optimizer]) -> None:
        """Do nothing."""

    step = staticmethod(step_unscaled)

    def state_dict(self) -> StateDict:
        """Nothing."""
        return {}

    def load_state_dict(self, state: StateDict) -> None:
        """Do nothing, and say so if there is a state."""
        warn_unused_scaler_state(state, self.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePrecision:
    """Models take inputs of any floating format and return float32, whatever the engine made of them.

    Args:
        read_scale: Returns the state of the engine's loss scale, unless the engine's own files have it.
        write_scale: Resumes from it.
    """

    name: str
    device_type: str
    scaler: None = None
    read_scale: Callable[[], StateDict] = dict
    write_scale: Callable[[StateDict], None] = lambda _: None

    def autocast(self, kwargs: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
        """A context for what is computed outside of models."""
        dtype = DTYPES.get(self.name)
        if dtype is None:
            return FullPrecision(device_type=self.device_type).autocast(kwargs)
        return torch.autocast(self.device_type, dtype, **({} if kwargs is None else kwargs.to_kwargs()))

    def convert(self, bundle: Bundle) -> Bundle:
        """Let every model's `forward` convert what it gets and returns."""
        if self.name in DTYPES:
            for model in bundle.models:
                wrap_forward(model, self._around)
        return bundle

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss; the engine scales it."""
        return loss

    def unscale(self, optimizers: Iterable[Optimizer]) -> None:
        """Do nothing; the engine does it when it steps."""

    def step(self, optimizer: Optimizer, closure: Callable[[], float] | None = None) -> bool:
        """Step."""
        return step_unscaled(optimizer, closure)

    def state_dict(self) -> StateDict:
        """The state of the engine's loss scale; empty where the engine's own files have it."""
        return self.read_scale()

    def load_state_dict(self, state: StateDict) -> None:
        """Resume from a state."""
        self.write_scale(state)

    def _around(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        dtype = DTYPES[self.name]

        @wraps(forward)
        def converted(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if _dtype_of(model) is not dtype:  # not in the hands of an engine, as for evaluation
                with self.autocast():
                    return convert_to_fp32(forward(model, *args, **kwargs))
            args, kwargs = recursively_apply(
                lambda tensor: tensor.to(dtype), (args, kwargs), test_type=_is_floating
            )
            return convert_to_fp32(forward(model, *args, **kwargs))

        return converted


def _dtype_of(model: nn.Module) -> torch.dtype | None:
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), None)


def _is_floating(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()
