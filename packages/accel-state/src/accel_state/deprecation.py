"""Mark public names as deprecated: `versions.md` has the rules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import typing_extensions

T = TypeVar("T", bound=Callable[..., Any])


def deprecated(*, since: str, until: str, instead: str) -> Callable[[T], T]:
    """Warn, at each call of a function or creation of an object, that its public name will be removed.

    Args:
        since: The version of accel that deprecates the name.
        until: The first version without it: at least two minor versions later.
        instead: What to use.

    Returns:
        A decorator for a function or class. Calls log a `FutureWarning` at the caller's line.

    Example:
        >>> import warnings
        >>> double = deprecated(since="0.1", until="0.3", instead="`2 * x`")(lambda x: 2 * x)
        >>> with warnings.catch_warnings(record=True, action="always") as caught:
        ...     double(4), str(caught[0].message)
        (8, '<lambda> is deprecated since accel 0.1 and will be removed in accel 0.3: use `2 * x`.')
    """

    def mark(target: T) -> T:
        message: Any = (
            f"{target.__qualname__} is deprecated since accel {since} and will be removed in accel {until}: "
            f"use {instead}."
        )
        return typing_extensions.deprecated(message, category=FutureWarning)(target)

    return mark
