"""Build a model without allocating weights: parameters move to the meta device when registered."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.overrides import TorchFunctionMode

from accel_bigmodel.placement import as_parameter
from accel_ops.modules import replaced_attributes

_UNDISPATCHED = [
    "eye_", "dirac_", "orthogonal_", "sparse_", "trunc_normal_", "xavier_normal_", "xavier_uniform_",
]  # fmt: skip
"""Initialisers of torch.nn.init that bypass the function mode, and compute before they fill."""

_RANDOM = [
    "normal_", "uniform_", "random_", "bernoulli_", "exponential_", "geometric_", "cauchy_", "log_normal_",
]  # fmt: skip
_CONSTANT = ["fill_", "zero_", "erfinv_", "clamp_"]
_INITIALISERS = ["normal_", "uniform_", "constant_", "ones_", "zeros_", "kaiming_normal_", "kaiming_uniform_"]
FILLS: frozenset[object] = frozenset(
    [
        *(getattr(Tensor, name) for name in _RANDOM + _CONSTANT),
        *(getattr(nn.init, name) for name in _INITIALISERS),
    ]
)
"""In-place fills: no-ops on a meta tensor, although some of them import the compiler."""


@contextmanager
def init_empty_weights(include_buffers: bool | None = None) -> Generator[None, None, None]:
    """Build models without memory for their parameters, in milliseconds.

    Parameters are created on the meta device, where initialisers are skipped. A parameter registered under
    two names stays tied. Only the thread that entered the block is affected.

    Args:
        include_buffers: Also create buffers (and all other new tensors) on the meta device. By default they
            are real: models compute buffers, such as rotary frequencies, that are in no checkpoint.

    Example:
        >>> from torch import nn
        >>> with init_empty_weights():
        ...     model = nn.Sequential(*[nn.Linear(10_000, 10_000) for _ in range(100)])
        >>> model[99].weight.device
        device(type='meta')
    """
    with init_on_device(torch.device("meta"), include_buffers=include_buffers):
        yield


@contextmanager
def init_on_device(
    device: torch.device | str | int, include_buffers: bool | None = None
) -> Generator[None, None, None]:
    """Build models with all parameters on a given device.

    Args:
        device: The device of parameters once they are registered.
        include_buffers: Also create buffers (and all other new tensors) on it.

    Example:
        >>> from torch import nn
        >>> with init_on_device("cpu"):
        ...     print(nn.Linear(2, 2).weight.device)
        cpu
    """
    mover = _Mover(torch.device(device))
    with ExitStack() as stack:
        # torch types these hooks as returning None; it documents that they may return a replacement.
        hook: Any = mover.parameter
        stack.callback(register_module_parameter_registration_hook(hook).remove)
        if include_buffers:
            hook = mover.buffer
            stack.callback(register_module_buffer_registration_hook(hook).remove)
            stack.enter_context(mover.device)
        if mover.device.type == "meta":
            # Initialisers that bypass modes return meta tensors unchanged; real tensors are still filled.
            skipped = {name: _unless_meta(getattr(nn.init, name)) for name in _UNDISPATCHED}
            stack.enter_context(replaced_attributes(nn.init, skipped))
            stack.enter_context(_SkipFillsOnMeta())
        yield


class _Mover:
    """Registration hooks that move the parameters and buffers registered by the entering thread."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._thread = threading.get_ident()
        self._moved: dict[int, tuple[weakref.ref[Tensor], nn.Parameter]] = {}

    def parameter(self, module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:  # noqa: ARG002 - the hook's signature
        if parameter is None or parameter.device == self.device or self._on_other_thread():
            return None
        original, moved = self._moved.get(id(parameter), (None, None))
        if moved is None or original is None or original() is not parameter:
            if isinstance(parameter, nn.UninitializedParameter):
                lazy: Any = type(parameter)
                kind: dict[str, Any] = {"device": self.device, "dtype": parameter.dtype}
                moved = lazy(requires_grad=parameter.requires_grad, **kind)
            else:
                moved = as_parameter(parameter.detach().to(self.device), parameter)
            self._moved[id(parameter)] = (weakref.ref(parameter), moved)
        return moved

    def buffer(self, module: nn.Module, name: str, buffer: Tensor | None) -> Tensor | None:  # noqa: ARG002 - the hook's signature
        if buffer is None or buffer.device == self.device or self._on_other_thread():
            return None
        return buffer.to(self.device)

    def _on_other_thread(self) -> bool:
        return threading.get_ident() != self._thread


def _unless_meta(initialiser: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(initialiser)
    def initialise(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return tensor if tensor.is_meta else initialiser(tensor, *args, **kwargs)

    return initialise


class _SkipFillsOnMeta(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in FILLS:
            target = args[0] if args else kwargs.get("tensor")
            if isinstance(target, Tensor) and target.is_meta:
                return target
        return func(*args, **kwargs)
