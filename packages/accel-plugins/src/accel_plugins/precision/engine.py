"""Precision where an engine owns it: the model is in the small format, and the engine scales losses."""

from __future__ import annotations

from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch

from accel_ops.modules import wrap_forward
from accel_ops.precision import convert_to_fp32
from accel_ops.tree import recursively_apply
from accel_plugins.precision.amp import FullPrecision
from accel_plugins.precision.scaling import step_unscaled

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from contextlib import AbstractContextManager

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from accel_plugins.bundle import Bundle
    from accel_plugins.kwargs.amp import AutocastKwargs
    from accel_plugins.roles import StateDict

_DTYPES: Mapping[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePrecision:
    """Models take inputs of any floating format and return float32, whatever the engine made of them."""

    name: str
    device_type: str
    scaler: None = None

    def autocast(self, kwargs: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
        """A context for what is computed outside of models."""
        dtype = _DTYPES.get(self.name)
        if dtype is None:
            return FullPrecision(device_type=self.device_type).autocast(kwargs)
        return torch.autocast(self.device_type, dtype, **({} if kwargs is None else kwargs.to_kwargs()))

    def convert(self, bundle: Bundle) -> Bundle:
        """Let every model's `forward` convert what it gets and returns."""
        if self.name in _DTYPES:
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
        """Nothing; the engine's checkpoint has its loss scale."""
        return {}

    def load_state_dict(self, state: StateDict) -> None:
        """Do nothing."""

    def _around(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        dtype = _DTYPES[self.name]

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
