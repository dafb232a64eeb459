"""Names under the path by which users of Accelerate import them.

Written by tools/gen_exports.py from api.toml and aliases.toml; change it there.
"""

# fmt: off
from __future__ import annotations

from typing import TYPE_CHECKING

from accel_state._lazy import attach

if TYPE_CHECKING:
    from accel_state.rng import set_seed, synchronize_rng_state, synchronize_rng_states

__all__ = ["set_seed", "synchronize_rng_state", "synchronize_rng_states"]

_EXPORTS = {
    **dict.fromkeys(("set_seed", "synchronize_rng_state", "synchronize_rng_states"), "accel_state.rng"),
}
__getattr__, __dir__ = attach(__name__, _EXPORTS)
