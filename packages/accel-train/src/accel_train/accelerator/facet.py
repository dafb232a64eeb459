"""The base of the facets of `Accelerator`: methods over one record of parts."""

from __future__ import annotations

from abc import ABC
from typing import TYPE_CHECKING, Any

from accel_train.accelerator.absent import missing_attribute

if TYPE_CHECKING:
    from accel_train.parts import Parts


class Facet(ABC):
    """Methods that belong together; all state is in the parts."""

    __slots__ = ("_parts",)
    _parts: Parts

    if not TYPE_CHECKING:  # type checkers are to report unknown attributes

        def __getattr__(self, name: str) -> Any:
            """Say what to use where an attribute of another library's `Accelerator` is asked for."""
            raise missing_attribute(self, name)
