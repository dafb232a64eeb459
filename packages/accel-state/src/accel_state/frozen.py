"""`frozen`, the decorator of our records."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar, dataclass_transform

_T = TypeVar("_T")


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(field,))
def frozen(cls: type[_T]) -> type[_T]:
    """Turn a class into a frozen, slotted, keyword-only dataclass.

    Example:
        >>> @frozen
        ... class Point:
        ...     x: int
        ...     y: int = 0
        >>> Point(x=1), Point(x=1) == Point(x=1, y=0)
        (Point(x=1, y=0), True)
    """
    return dataclass(frozen=True, slots=True, kw_only=True)(cls)
