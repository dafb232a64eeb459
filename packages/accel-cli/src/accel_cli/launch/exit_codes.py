"""Exit codes of programs that start processes; what is missing is one sentence."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from accel_state.errors import AccelError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ERROR = 2
"""The exit code of what cannot be carried out, as of the command."""


def run_program(main: Callable[[Sequence[str]], None], arguments: Sequence[str]) -> int:
    """Run a program; return 0, or 2 after an `AccelError`, whose message is printed."""
    try:
        main(arguments)
    except AccelError as error:
        sys.stderr.write(f"accel launch: error: {error}\n")
        return ERROR
    return 0
