"""What this process is: rank, device, precision, accumulation.

Written by tools/gen_exports.py from api.toml and aliases.toml; change it there.
"""

# fmt: off
from __future__ import annotations

from typing import TYPE_CHECKING

from accel_state._lazy import attach

if TYPE_CHECKING:
    from accel_state.accelerator_state import (
        AcceleratorState, ThreadLocalSharedDict, do_nothing, is_initialized,
    )
    from accel_state.gradient_state import GradientState
    from accel_state.partial_state import PartialState

__all__ = [
    "AcceleratorState", "GradientState", "PartialState", "ThreadLocalSharedDict", "do_nothing",
    "is_initialized",
]

_EXPORTS = {
    **dict.fromkeys((
        "AcceleratorState", "ThreadLocalSharedDict", "do_nothing", "is_initialized",
    ), "accel_state.accelerator_state"),
    **dict.fromkeys(("GradientState",), "accel_state.gradient_state"),
    **dict.fromkeys(("PartialState",), "accel_state.partial_state"),
}
__getattr__, __dir__ = attach(__name__, _EXPORTS)
