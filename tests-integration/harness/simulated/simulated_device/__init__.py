"""Entry point `torch.backends`: `import torch` registers the device that SIMULATED_DEVICE names."""

from __future__ import annotations

import os
from importlib import import_module


def register() -> None:
    """Register the device, in every process whose environment asks for it."""
    if os.environ.get("SIMULATED_DEVICE"):
        import_module("simulated_device.registration").register()
