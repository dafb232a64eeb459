"""The base of the facets of `Accelerator`: methods over one record of parts."""

from __future__ import annotations

from abc import ABC
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from accel_train.parts import Parts


class Facet(ABC):
    """Methods that belong together; all state is in the parts."""

    __slots__ = ("_parts",)
    _parts: Parts
