"""Decorator for functions that need a run with DeepSpeed."""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from accel_state import environ
from accel_state.accelerator_state import AcceleratorState, is_initialized
from accel_state.settings import from_environ

if TYPE_CHECKING:
    from collections.abc import Callable

P = ParamSpec("P")
R = TypeVar("R")


def deepspeed_required(func: Callable[P, R]) -> Callable[P, R]:
    """Make a function raise in runs without DeepSpeed.

    Args:
        func: The function.

    Returns:
        The function; it raises `ValueError` in other runs.

    Example:
        >>> @deepspeed_required
        ... def stage():
        ...     return 3
        >>> stage()
        Traceback (most recent call last):
        ...
        ValueError: stage() needs DeepSpeed, which this run does not use.
    """

    @wraps(func)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        if not _is_enabled():
            raise ValueError(f"{func.__name__}() needs DeepSpeed, which this run does not use.")
        return func(*args, **kwargs)

    return checked


def _is_enabled() -> bool:
    if is_initialized() and AcceleratorState().deepspeed_plugin is not None:
        return True
    return from_environ(environ.read()).deepspeed is not None
