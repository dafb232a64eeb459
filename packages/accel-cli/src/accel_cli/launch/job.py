"""What is run in the end: a command line and an environment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A program to become."""

    command: tuple[str, ...]
    environ: Mapping[str, str]
