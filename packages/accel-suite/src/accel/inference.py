"""Pipelined inference over several devices.

Written by tools/gen_exports.py from api.toml and aliases.toml; change it there.
"""

# fmt: off
from __future__ import annotations

from typing import TYPE_CHECKING

from accel_state._lazy import attach

if TYPE_CHECKING:
    from accel_bigmodel.device_map.stages import generate_device_map
    from accel_bigmodel.pipeline import (
        build_pipeline, find_pippy_batch_size, pippy_forward, prepare_pippy,
    )

__all__ = [
    "build_pipeline", "find_pippy_batch_size", "generate_device_map", "pippy_forward", "prepare_pippy",
]

_EXPORTS = {
    **dict.fromkeys(("generate_device_map",), "accel_bigmodel.device_map.stages"),
    **dict.fromkeys((
        "build_pipeline", "find_pippy_batch_size", "pippy_forward", "prepare_pippy",
    ), "accel_bigmodel.pipeline"),
}
__getattr__, __dir__ = attach(__name__, _EXPORTS)
