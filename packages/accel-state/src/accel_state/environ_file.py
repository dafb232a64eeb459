"""Write variables as the lines of an environment file."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

_FORBIDDEN = frozenset(";\n\r\0<> ")

logger = logging.getLogger(__name__)


def convert_dict_to_env_variables(current_env: Mapping[str, Any]) -> list[str]:
    r"""Write variables as lines for an environment file, leaving out what such a file cannot hold.

    Returns:
        `NAME=value` with a line end, one per variable. A variable whose name or value is empty, or holds
        white space, a line end, `;`, `<` or `>`, or whose name holds `=`, is left out with a warning.

    Example:
        >>> convert_dict_to_env_variables({"ACCELERATE_DEBUG_MODE": "1"})
        ['ACCELERATE_DEBUG_MODE=1\n']
    """
    lines: list[str] = []
    for name, value in current_env.items():
        text = str(value)
        if name and text and "=" not in name and not _FORBIDDEN & {*name, *text}:
            lines.append(f"{name}={text}\n")
        else:
            logger.warning(
                "left out the variable %r=%r: a line of an environment file cannot hold it", name, text
            )
    return lines
