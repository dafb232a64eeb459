"""Options of mixed precision: the autocast context and the loss scaler."""

from __future__ import annotations

from dataclasses import dataclass

from accel_plugins.kwargs.base import KwargsHandler, expect, expect_flags, is_count


@dataclass
class AutocastKwargs(KwargsHandler):
    """Options of `torch.autocast`, for a run or for one `accelerator.autocast` block.

    Args:
        enabled: Whether operations run in the lower precision.
        cache_enabled: Whether casts of weights are kept until the context ends; torch's choice if `None`.

    Raises:
        SettingsError: A field is not a bool.

    Example:
        >>> AutocastKwargs(cache_enabled=False).to_kwargs()
        {'cache_enabled': False}
    """

    enabled: bool = True
    cache_enabled: bool | None = None

    def __post_init__(self) -> None:
        expect_flags(self, "cache_enabled")


@dataclass
class GradScalerKwargs(KwargsHandler):
    """Options of the loss scaler that fp16 needs; see `torch.amp.GradScaler`.

    Args:
        init_scale: The first scale.
        growth_factor: Multiplies the scale after `growth_interval` good steps; above 1.
        backoff_factor: Multiplies the scale after a step with infinite gradients; between 0 and 1.
        growth_interval: Number of good steps in a row before the scale grows.
        enabled: Whether losses are scaled.

    Raises:
        SettingsError: A field is out of its range.
    """

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    enabled: bool = True

    def __post_init__(self) -> None:
        expect(self, "init_scale", "a number above 0", lambda value: value > 0)
        expect(self, "growth_factor", "a number above 1", lambda value: value > 1)
        expect(self, "backoff_factor", "a number between 0 and 1", lambda value: 0 < value < 1)
        expect(self, "growth_interval", "a whole number above 0", lambda value: is_count(value, least=1))
        expect_flags(self)
