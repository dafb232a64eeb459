"""Mark public names as deprecated, by the rules of the page of versions."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T", bound=Callable[..., Any])


def deprecated(*, since: str, until: str, instead: str) -> Callable[[T], T]:
    """Warn at each call of a function, or creation of an object, that its public name will be removed.

    Args:
        since: The version of accel that deprecates the name.
        until: The first version without it: at least two minor versions later.
        instead: What to use. The `FutureWarning` names all three, at the caller's line.
    """

    def mark(target: Any) -> Any:
        call = target.__init__ if isinstance(target, type) else target

        @functools.wraps(call)
        def warned(*args: Any, **kwargs: Any) -> Any:
            message = f"{target.__qualname__} is deprecated since accel {since} and will be removed in accel"
            warnings.warn(f"{message} {until}: use {instead}.", FutureWarning, stacklevel=2)
            return call(*args, **kwargs)

        if not isinstance(target, type):
            return warned
        setattr(target, "__init__", warned)  # noqa: B010
        return target

    return mark
