"""Weight files: their names, sizes, shards and aliases; reading and writing them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel_state._lazy import attach

if TYPE_CHECKING:
    from accel_ops.weights import write as write

# Imported by the first use: safetensors.torch takes 0.01 s.
__getattr__, __dir__ = attach(__name__, {"write": "accel_ops.weights.write:"})
