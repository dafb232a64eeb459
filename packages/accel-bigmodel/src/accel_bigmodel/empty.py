"""Build a model without its weights: parameters go to the meta device as they are registered."""

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

from accel_ops.modules import replaced_attributes

_UNDISPATCHED = [
    "eye_", "dirac_", "orthogonal_", "sparse_", "trunc_normal_", "xavier_normal_", "xavier_uniform_",
]  # fmt: skip
"""Initialisers of torch.nn.init that do not ask the function mode, and compute before they fill."""

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
"""In-place fills: without effect on a meta tensor, and some of them import the compiler to find that out."""


@contextmanager
def init_empty_weights(include_buffers: bool | None = None) -> Generator[None, None, None]:
    """Build models without memory for their parameters, in milliseconds.

    Parameters land on the meta device; initialisers are skipped there. A parameter registered under two names
    stays one. Only the thread that entered is affected.

    Args:
        include_buffers: Put buffers (and every other new tensor) there too. By default they are real: models
            compute buffers, such as rotary frequencies, that no checkpoint holds.

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
    """Build models with all parameters on one device.

    Args:
        device: Where parameters go as they are registered.
        include_buffers: Put buffers (and every other new tensor) there too.

    Example:
        >>> from torch import nn
        >>> with init_on_device("cpu"):
        ...     print(nn.Linear(2, 2).weight.device)
        cpu
    """
    mover = _Mover(torch.device(device))
    with ExitStack() as stack:
        # torch types these hooks as returning nothing; it documents that they may return a replacement.
        hook: Any = mover.parameter
        stack.callback(register_module_parameter_registration_hook(hook).remove)
        if include_buffers:
            hook = mover.buffer
            stack.callback(register_module_buffer_registration_hook(hook).remove)
            stack.enter_context(mover.device)
        if mover.device.type == "meta":
            # Initialisers that no mode sees return meta tensors as they are; real ones are still filled.
            skipped = {name: _unless_meta(getattr(nn.init, name)) for name in _UNDISPATCHED}
            stack.enter_context(replaced_attributes(nn.init, skipped))
            stack.enter_context(_SkipFillsOnMeta())
        yield


class _Mover:
    """Registration hooks that move what the entering thread registers."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._thread = threading.get_ident()
        self._moved: dict[int, tuple[weakref.ref[Tensor], nn.Parameter]] = {}

    def parameter(self, module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:  # noqa: ARG002 - the hook's signature
        if parameter is None or parameter.device == self.device or self._on_other_thread():
            return None
        original, moved = self._moved.get(id(parameter), (None, None))
        if moved is None or original is None or original() is not parameter:
            moved = _parameter_on(parameter, self.device)
            self._moved[id(parameter)] = (weakref.ref(parameter), moved)
        return moved

    def buffer(self, module: nn.Module, name: str, buffer: Tensor | None) -> Tensor | None:  # noqa: ARG002 - the hook's signature
        return None if buffer is None or self._on_other_thread() else buffer.to(self.device)

    def _on_other_thread(self) -> bool:
        return threading.get_ident() != self._thread


def _parameter_on(parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    data = parameter.detach().to(device)
    if type(parameter) is nn.Parameter:
        moved = nn.Parameter(data, requires_grad=parameter.requires_grad)
        vars(moved).update(vars(parameter))
        return moved
    return type(parameter)(data, requires_grad=parameter.requires_grad, **vars(parameter))


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
