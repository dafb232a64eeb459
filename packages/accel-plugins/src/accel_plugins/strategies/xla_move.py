"""Move models to an XLA device, with optimizers and tied weights still pointing at the same parameters."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from accel_plugins.strategies.replicated import move_to_device

if TYPE_CHECKING:
    from collections.abc import Generator

    from torch import nn

    from accel_plugins.bundle import Bundle


def move_to_xla(bundle: Bundle, device: torch.device) -> list[nn.Module]:
    """Move models to the device, except those whose placement the caller has forbidden.

    Args:
        bundle: Models, on any device.
        device: The XLA device.

    Returns:
        The models, in order; parameters stay the same objects.
    """
    with _swapped():
        return move_to_device(bundle, device)


@contextmanager
def _swapped() -> Generator[None]:
    """Let `Module.to` swap contents of parameters, which it otherwise replaces by new ones on XLA devices.

    https://docs.pytorch.org/docs/stable/future_mod.html
    """
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)
