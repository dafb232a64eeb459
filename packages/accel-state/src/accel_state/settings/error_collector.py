"""Collect the errors of settings, so that one exception reports all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel_state.errors import SettingsError

if TYPE_CHECKING:
    from types import TracebackType


class ErrorCollector:
    """A reusable context manager that collects `SettingsError`s instead of raising them.

    Attributes:
        found: A sentence for each error.

    Example:
        >>> problems = ErrorCollector()
        >>> for text in ("1", "a", "b"):
        ...     with problems:
        ...         if not text.isdecimal():
        ...             raise SettingsError(f"{text!r} is no number")
        >>> problems.found
        ["'a' is no number", "'b' is no number"]
    """

    def __init__(self) -> None:
        self.found: list[str] = []

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if isinstance(error, SettingsError):
            self.found += error.problems
        return isinstance(error, SettingsError)

    def raise_if_any(self) -> None:
        """Raise one SettingsError with all collected errors, if any.

        Raises:
            SettingsError: Errors were collected.
        """
        if self.found:
            raise SettingsError(*self.found)
