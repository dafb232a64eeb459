"""Undo what a function, or the tests of a class, have done to the `ACCELERATE_*` variables."""

from __future__ import annotations

import functools
import inspect
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar, cast

from accel_state.environ import accelerate_values, restore_accelerate_values

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping
    from contextlib import _GeneratorContextManager  # pyright: ignore[reportPrivateUsage] - what decorates

_Decorated = TypeVar("_Decorated", bound="Callable[..., Any]")


def purge_accelerate_environment(func_or_cls: _Decorated) -> _Decorated:
    """Decorate a function or a class so that `ACCELERATE_*` variables which it sets do not outlive a call.

    Variables that existed before get their values back; those that the function removed stay away, and
    other variables are left alone. Of a class, the methods that begin with `test` are treated so, also those
    that subclasses define; what `setUp`, `setup_method` and their likes set is kept between them, until the
    matching teardown.

    Example:
        >>> from accel_state.environ import publish, read
        >>> @purge_accelerate_environment
        ... def configure():
        ...     publish({"ACCELERATE_MIXED_PRECISION": "bf16"})
        >>> configure()
        >>> "ACCELERATE_MIXED_PRECISION" in read()
        False
    """
    if not isinstance(func_or_cls, type):
        return cast("_Decorated", _purging(func_or_cls))
    _purge_methods(func_or_cls)

    hook = vars(func_or_cls).get("__init_subclass__")

    def purge_subclass(cls: type, **kwargs: Any) -> None:
        if hook is None:
            super(func_or_cls, cls).__init_subclass__(**kwargs)
        else:
            hook.__func__(cls, **kwargs)
        _purge_methods(cls)

    setattr(func_or_cls, "__init_subclass__", classmethod(purge_subclass))  # noqa: B010 - no stub knows it
    return cast("_Decorated", func_or_cls)


@contextmanager
def _purged() -> Generator[None]:
    before = accelerate_values()
    try:
        yield
    finally:
        restore_accelerate_values(before)


def _purging(
    function: Callable[..., Any], scope: Callable[[], _GeneratorContextManager[None]] = _purged
) -> Callable[..., Any]:
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def awaiting(*args: Any, **kwargs: Any) -> Any:
            with scope():
                return await function(*args, **kwargs)

        return awaiting

    return scope()(function)


# What test frameworks call before and after the methods of a class.
_LIFECYCLES = {
    "setUp": "tearDown",
    "asyncSetUp": "asyncTearDown",
    "setUpClass": "tearDownClass",
    "setup_method": "teardown_method",
    "setup_class": "teardown_class",
}


def _purge_methods(cls: type) -> None:
    scopes = _lifecycle_scopes()
    for setup, teardown in _LIFECYCLES.items():
        if setup in vars(cls) and teardown not in vars(cls):
            setattr(cls, teardown, _inherited(cls, teardown, vars(cls)[setup]))
    for name, member in list(vars(cls).items()):
        if not name.startswith("test") and name not in scopes:
            continue
        function = member.__func__ if isinstance(member, classmethod | staticmethod) else member
        if not inspect.isfunction(function):
            continue
        purging = _purging(function, scopes.get(name, _purged))
        if name in scopes and not inspect.iscoroutinefunction(function):
            purging = _optional_argument(purging, function)
        setattr(cls, name, type(member)(purging) if function is not member else purging)


def _lifecycle_scopes() -> Mapping[str, Callable[[], _GeneratorContextManager[None]]]:
    """For every set-up and tear-down method the scope that remembers, or drops, what the set-up adds."""
    before: dict[str, Mapping[str, str]] = {}

    @contextmanager
    def opening(setup: str) -> Generator[None]:
        before[setup] = accelerate_values()
        try:
            yield
        except BaseException:  # also when interrupted: no tear-down follows a set-up that failed
            restore_accelerate_values(before.pop(setup))
            raise

    @contextmanager
    def closing(setup: str) -> Generator[None]:
        saved = before.pop(setup) if setup in before else accelerate_values()
        try:
            yield
        finally:
            restore_accelerate_values(saved)

    return {name: functools.partial(opening, name) for name in _LIFECYCLES} | {
        teardown: functools.partial(closing, name) for name, teardown in _LIFECYCLES.items()
    }


def _optional_argument(purging: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """Accept the argument that pytest passes to those set-up methods that declare one."""
    wants_argument = len(inspect.signature(function).parameters) > 1

    @functools.wraps(function)
    def calling(owner: Any, argument: Any = None) -> Any:
        return purging(owner, argument) if wants_argument else purging(owner)

    return calling


def _inherited(cls: type, name: str, like: Any) -> Any:
    """A tear-down method that does what it did without one: call the parent's, if there is any."""

    def teardown(owner: Any, argument: Any) -> Any:
        parent = getattr(super(cls, owner), name, None)
        if parent is None:
            return None
        return parent(argument) if len(inspect.signature(parent).parameters) == 1 else parent()

    async def async_teardown(owner: Any) -> None:
        await getattr(super(cls, owner), name)()

    if inspect.iscoroutinefunction(like):
        return async_teardown
    return classmethod(teardown) if isinstance(like, classmethod) else teardown  # pyright: ignore[reportUnknownVariableType]
