"""Names under the path by which users of Accelerate import them.

Written by tools/gen_exports.py from api.toml and aliases.toml; change it there.
"""

# fmt: off
from __future__ import annotations

from typing import TYPE_CHECKING

from accel_state._lazy import attach

if TYPE_CHECKING:
    from accel_plugins.megatron.dummy import MegatronLMDummyDataLoader, MegatronLMDummyScheduler
    from accel_plugins.megatron.losses import avg_losses_across_data_parallel_group
    from accel_state.available import is_megatron_lm_available

__all__ = [
    "MegatronLMDummyDataLoader", "MegatronLMDummyScheduler", "avg_losses_across_data_parallel_group",
    "is_megatron_lm_available",
]

_EXPORTS = {
    **dict.fromkeys((
        "MegatronLMDummyDataLoader", "MegatronLMDummyScheduler",
    ), "accel_plugins.megatron.dummy"),
    **dict.fromkeys(("avg_losses_across_data_parallel_group",), "accel_plugins.megatron.losses"),
    **dict.fromkeys(("is_megatron_lm_available",), "accel_state.available"),
}
__getattr__, __dir__ = attach(__name__, _EXPORTS)
