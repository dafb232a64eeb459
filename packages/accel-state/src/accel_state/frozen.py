"""`frozen`, a class decorator for frozen dataclasses that are cheap to define."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, FrozenInstanceError, dataclass, field, fields
from operator import attrgetter
from typing import Any, TypeVar, dataclass_transform

_T = TypeVar("_T")


class _Factory:
    """The default of an argument whose field has a `default_factory`."""

    def __repr__(self) -> str:
        return "<factory>"


_FACTORY = _Factory()


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(field,))
def frozen(cls: type[_T]) -> type[_T]:
    """Turn a class into a frozen, slotted, keyword-only dataclass.

    It behaves as with `@dataclass(frozen=True, slots=True, kw_only=True)`, which before Python 3.13 compiles
    six methods for each class, one by one: half of the time of `from accel import Accelerator`.
    Here only `__init__` is compiled, and all such classes share the other methods.

    Example:
        >>> @frozen
        ... class Point:
        ...     x: int
        ...     y: int = 0
        >>> Point(x=1), Point(x=1) == Point(x=1, y=0)
        (Point(x=1, y=0), True)
    """
    for name, method in _METHODS.items():
        if vars(cls).get(name) is None:  # `__hash__` is None in a class that defines `__eq__`
            setattr(cls, name, method)
    # `dataclass` would compile the methods of a frozen class, and does not derive a non-frozen class from it.
    parameters = [base.__dataclass_params__ for base in cls.__mro__ if "__dataclass_params__" in vars(base)]
    for of_base in parameters:
        of_base.frozen = False
    cls = dataclass(init=False, repr=False, eq=False, match_args=False, slots=True)(cls)
    for of_class in (*parameters, cls.__dataclass_params__):  # pyright: ignore[reportAttributeAccessIssue] - is a dataclass
        of_class.frozen = True  # a frozen dataclass may be derived from it
    compared = [item.name for item in fields(cls) if item.compare]  # pyright: ignore[reportArgumentType] - is a dataclass
    own: dict[str, Any] = {"__init__": _make_init(cls), "__values__": attrgetter(*compared or ["__class__"])}
    for name, value in own.items():
        setattr(cls, name, value)
    return cls


def _make_init(cls: type[Any]) -> Callable[..., None]:
    parameters: list[str] = []
    lines: list[str] = []
    names: dict[str, Any] = {"set_field": object.__setattr__, "FACTORY": _FACTORY}
    annotations: dict[str, Any] = {}
    for item in fields(cls):
        value, default, make = item.name, f"default_{item.name}", f"make_{item.name}"
        names[default], names[make] = item.default, item.default_factory
        if item.init:
            annotations[item.name] = item.type
            if item.default_factory is not MISSING:
                default, value = "FACTORY", f"{make}() if {value} is FACTORY else {value}"
            is_required = item.default is MISSING and item.default_factory is MISSING
            parameters.append(item.name if is_required else f"{item.name}={default}")
        elif item.default_factory is not MISSING:
            value = f"{make}()"
        elif item.default is not MISSING:
            value = default
        else:
            continue  # `__post_init__` sets it
        lines.append(f"set_field(self, {item.name!r}, {value})")
    if hasattr(cls, "__post_init__"):
        lines.append("self.__post_init__()")
    signature = f"self, *, {', '.join(parameters)}" if parameters else "self"
    exec(f"def __init__({signature}):\n " + "\n ".join(lines or ["pass"]), names)  # noqa: S102 - as dataclasses do
    init: Callable[..., None] = names["__init__"]
    init.__qualname__ = f"{cls.__qualname__}.__init__"
    init.__annotations__ = {**annotations, "return": None}
    return init


def _repr(self: Any) -> str:
    shown = (f"{item.name}={getattr(self, item.name)!r}" for item in fields(self) if item.repr)
    return f"{type(self).__qualname__}({', '.join(shown)})"


def _eq(self: Any, other: object) -> bool:
    if other.__class__ is not self.__class__:
        return NotImplemented
    return self is other or self.__values__(self) == self.__values__(other)


def _hash(self: Any) -> int:
    return hash(self.__values__(self))


def _setattr(_self: object, name: str, _value: object) -> None:
    raise FrozenInstanceError(f"cannot assign to field {name!r}")


def _delattr(_self: object, name: str) -> None:
    raise FrozenInstanceError(f"cannot delete field {name!r}")


def _getstate(self: Any) -> list[Any]:
    return [getattr(self, item.name) for item in fields(self)]


def _setstate(self: Any, state: list[Any]) -> None:
    for item, value in zip(fields(self), state, strict=True):
        object.__setattr__(self, item.name, value)


_METHODS = {
    "__repr__": _repr,
    "__eq__": _eq,
    "__hash__": _hash,
    "__setattr__": _setattr,
    "__delattr__": _delattr,
    "__getstate__": _getstate,
    "__setstate__": _setstate,
}
