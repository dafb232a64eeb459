"""The error classes, and the suggestion of the nearest known name.

AccelError
├── SettingsError                   (ValueError)           arguments, variables or file keys are unusable
├── MissingDependencyError          (ImportError)          an optional library is not installed
├── CheckpointError                 (ValueError)           weights are damaged, unsafe or do not fit
├── CheckpointWriteError            (OSError)              a checkpoint could not be written on some rank
├── UnsupportedError                (NotImplementedError)  the active strategy does not offer this
├── TrackerError                    (RuntimeError)         trackers were called at the wrong time
└── DistributedOperationException   (RuntimeError)         the ranks do not agree on a collective
    └── StalledCollectiveError      (TimeoutError)         a collective did not complete
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class AccelError(Exception):
    """The base of every error that accel raises on purpose."""


class SettingsError(AccelError, ValueError):
    """Settings cannot be used. The message names each value, where it came from, and the way out.

    Args:
        *problems: A sentence for each thing that is wrong.

    Example:
        >>> print(SettingsError("--lr is 'x'", "--lr needs --train"))
        several settings cannot be used:
        - --lr is 'x'
        - --lr needs --train
    """

    def __init__(self, *problems: str) -> None:
        super().__init__(*problems)
        self.problems = problems

    def __str__(self) -> str:
        several = ("several settings cannot be used:",) if self.problems[1:] else ()
        return "\n- ".join((*several, *self.problems))


class MissingDependencyError(AccelError, ImportError):
    """An optional library is needed but not installed. The message names the extra that installs it."""


class CheckpointError(AccelError, ValueError):
    """A checkpoint is damaged, unsafe or does not fit the model. The message names file and tensor."""


class CheckpointMismatchError(CheckpointError, RuntimeError):
    """Names or shapes of a checkpoint differ from the model's; a `RuntimeError`, like `load_state_dict`'s."""


class CheckpointWriteError(AccelError, OSError):
    """A checkpoint could not be written. The message names rank, file and older checkpoints."""


class UnsupportedError(AccelError, NotImplementedError):
    """The active strategy, device or backend does not support the request."""


class TrackerError(AccelError, RuntimeError):
    """Experiment trackers were called before they were started, or after they were finished."""


class DistributedOperationException(AccelError, RuntimeError):  # noqa: N818 - the documented name
    """The ranks called different collectives, or the same collective on data that does not match."""


class StalledCollectiveError(DistributedOperationException, TimeoutError):
    """A collective did not complete. The message shows where every rank was."""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message; the name of its class if it has none.

    Example:
        >>> first_line(OSError(28, "No space left on device")), first_line(EOFError())
        ('No space left on device', 'EOFError')
    """
    text = getattr(error, "strerror", None) or str(error)
    return (text.splitlines() or [""])[0] or type(error).__name__


def some_of(names: Iterable[str], *, most: int = 10, width: int = 100) -> str:
    """Format names for a message: the first ones, each cut to `width` characters, and the number of others.

    Example:
        >>> some_of(["a", "b", "c"], most=2), some_of(["a" * 9], width=4)
        ('a, b and 1 more', 'aaa…')
    """
    listed = [*names]
    shown = [name if len(name) <= width else f"{name[: width - 1]}…" for name in listed[:most]]
    return ", ".join(shown) + (f" and {len(listed) - most} more" if len(listed) > most else "")


def nearest(name: object, known: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """Return the known name that is most similar to another; `None` if none is similar.

    Example:
        >>> nearest("colour", ["color", "size"])
        'color'
    """
    return next(iter(get_close_matches(str(name), [*known], n=1, cutoff=cutoff)), None)


def did_you_mean(name: object, known: Iterable[str], otherwise: str, *, cutoff: float = 0.6) -> str:
    """Return a sentence that suggests the nearest known name, or `otherwise` if none is near.

    Example:
        >>> did_you_mean("colour", ["color", "size"], "there are 'color' and 'size'.")
        "did you mean 'color'?"
    """
    near = nearest(name, known, cutoff=cutoff)
    return otherwise if near is None else f"did you mean {near!r}?"
