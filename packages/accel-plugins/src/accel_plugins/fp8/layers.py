"""Linear layers that can multiply in 8 bits."""

from __future__ import annotations

from typing import Any


def is_divisible(layer: Any) -> bool:
    """Return whether both sizes of a linear layer, of torch or a library, are divisible by 16.

    Args:
        layer: With `in_features` and `out_features`.
    """
    return layer.in_features % 16 == 0 and layer.out_features % 16 == 0
