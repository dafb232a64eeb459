"""Names under the path by which users of Accelerate import them.

Written by tools/gen_exports.py from api.toml and aliases.toml; change it there.
"""

# fmt: off
from __future__ import annotations

from typing import TYPE_CHECKING

from accel_state._lazy import attach

if TYPE_CHECKING:
    from accel_bigmodel.offload import (
        OffloadedWeightsLoader, PrefixedDataset, extract_submodules_state_dict, load_offloaded_weight,
        offload_state_dict, offload_weight,
    )
    from accel_bigmodel.offload_index import save_offload_index

__all__ = [
    "OffloadedWeightsLoader", "PrefixedDataset", "extract_submodules_state_dict", "load_offloaded_weight",
    "offload_state_dict", "offload_weight", "save_offload_index",
]

_EXPORTS = {
    **dict.fromkeys((
        "OffloadedWeightsLoader", "PrefixedDataset", "extract_submodules_state_dict",
        "load_offloaded_weight", "offload_state_dict", "offload_weight",
    ), "accel_bigmodel.offload"),
    **dict.fromkeys(("save_offload_index",), "accel_bigmodel.offload_index"),
}
__getattr__, __dir__ = attach(__name__, _EXPORTS)
