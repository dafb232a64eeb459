"""Read the functions of example scripts, for tests that compare them."""

from __future__ import annotations

from collections.abc import Sequence


def clean_lines(lines: Sequence[str]) -> list[str]:
    r"""Remove empty lines and comments.

    Example:
        >>> clean_lines(["# title\n", "\n", "x = 1\n"])
        ['x = 1\n']
    """
    return [line for line in lines if line != "\n" and not line.lstrip().startswith("#")]


def get_function_contents_by_name(lines: Sequence[str], name: str) -> list[str] | None:
    """Return the lines of the function `training_function` or `main` of a script.

    Args:
        lines: The lines of the script, in which `main` follows `training_function`.
        name: `"training_function"` or `"main"`.

    Returns:
        Its lines without empty ones and comments; None if the script has no such function.

    Raises:
        ValueError: `name` is another name.
    """
    ends = {"training_function": "def main", "main": 'if __name__ == "__main__"'}
    if name not in ends:
        raise ValueError(
            f"Incorrect function name passed: {name}, choose either 'main' or 'training_function'"
        )
    starts = [index for index, line in enumerate(lines) if line.startswith(f"def {name}")]
    if not starts:
        return None
    end = next((index for index in range(starts[0], len(lines)) if lines[index].startswith(ends[name])), None)
    return None if end is None else clean_lines(lines[starts[0] : end])
