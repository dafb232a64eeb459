"""A table of small programs: one function over one library, once for every combination of its arguments."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

CASES: dict[str, Case] = {}


@dataclass(frozen=True)
class Case:
    """One program with its arguments.

    Args:
        name: `area/program[argument=value,...]`.
        program: Called with the library, and the arguments.
        arguments: By name.
        worlds: With how many processes it runs.
    """

    name: str
    program: Callable[..., Any]
    arguments: dict[str, Any]
    worlds: tuple[int, ...]


def cases(
    area: str, *, worlds: tuple[int, ...] = (1,), **axes: Iterable[Any]
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Enter a program into the table, once for every combination.

    Args:
        area: What it is about.
        worlds: With how many processes it runs.
        **axes: Values of its arguments.
    """

    def enter(program: Callable[..., Any]) -> Callable[..., Any]:
        names = [*axes]
        for values in product(*axes.values()):
            values_text = ",".join(f"{name}={value}" for name, value in zip(names, values, strict=True))
            name = f"{area}/{program.__name__}" + (f"[{values_text}]" if values_text else "")
            if name in CASES:
                raise ValueError(f"two programs are called {name!r}")
            CASES[name] = Case(name, program, dict(zip(names, values, strict=True)), worlds)
        return program

    return enter
