"""What is wrong with settings, brought together, so that all of it is told at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel_state.errors import SettingsError

if TYPE_CHECKING:
    from types import TracebackType


class Problems:
    """A context, to be entered again and again, in which what is wrong is noted rather than raised.

    Attributes:
        found: A sentence for each thing that is wrong.

    Example:
        >>> problems = Problems()
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

    def tell(self) -> None:
        """Raise what was noted, if there is anything.

        Raises:
            SettingsError: Something is wrong; all of it.
        """
        if self.found:
            raise SettingsError(*self.found)
