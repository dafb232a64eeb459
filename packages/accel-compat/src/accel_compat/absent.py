"""Names of Accelerate that accel does not have, and what to do instead."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

REPORT = "Please report it to the developers of accel-compat, with the library that imports it, and for what."

INSTEAD: Mapping[str, str] = {
    "accelerate.commands.estimate.gather_data": "`accel estimate-memory --json` prints the numbers.",
    "accelerate.commands.menu": "It was private; `questionary` asks such questions.",
    "accelerate.test_utils": "It is for Accelerate's own tests; `accel test` checks a machine.",
    "accelerate.utils.megatron_lm": "prepare() makes it; accel.utils has the documented names.",
    "accelerate.utils.modeling.get_state_dict_from_offload": (
        "It was private; accelerate.utils.modeling.get_state_dict_offloaded_model gives all weights."
    ),
}
"""By name, or by that of its module, what is there instead."""


def instead_of(name: str) -> str:
    """Say what to do without a name.

    Args:
        name: The name, from `accelerate.` on.

    Example:
        >>> instead_of("accelerate.utils.megatron_lm.MegatronEngine")
        'prepare() makes it; accel.utils has the documented names.'
    """
    while name:
        if name in INSTEAD:
            return INSTEAD[name]
        name = name.rpartition(".")[0]
    return REPORT
