"""Whole-model CPU offload: one model of a pipeline is on the device at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from accel_bigmodel.hooks.base import ModelHook, remove_hook_from_module
from accel_ops.move import send_to_device

if TYPE_CHECKING:
    from torch import nn


class CpuOffload(ModelHook):
    """Keep a model on the CPU until its forward is called; it then stays on the device.

    Args:
        execution_device: Where it runs; by default the accelerator, if there is one.
        prev_module_hook: The hook of a model that ran before: it goes back to the CPU first.
    """

    def __init__(
        self,
        execution_device: str | int | torch.device | None = None,
        prev_module_hook: UserCpuOffloadHook | None = None,
    ) -> None:
        self.prev_module_hook = prev_module_hook
        self.execution_device = default_device() if execution_device is None else execution_device

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Put the model on the CPU."""
        return module.to("cpu")

    def pre_forward(
        self, module: nn.Module, *args: Any, **kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Offload the model before, and move the model and its inputs to the device."""
        if self.prev_module_hook is not None and self.prev_module_hook.model is not module:
            self.prev_module_hook.offload()
            if torch.accelerator.is_available():
                torch.accelerator.empty_cache()
        module.to(self.execution_device)
        return send_to_device(args, self.execution_device), send_to_device(kwargs, self.execution_device)


class UserCpuOffloadHook:
    """The handle that `cpu_offload_with_hook` gives: sends a model back, or frees it of its hook."""

    def __init__(self, model: nn.Module, hook: ModelHook) -> None:
        self.model = model
        self.hook = hook

    def offload(self) -> None:
        """Send the model back to the CPU."""
        self.hook.init_hook(self.model)

    def remove(self) -> None:
        """Remove the hook from the model."""
        remove_hook_from_module(self.model)


def default_device() -> torch.device:
    """Return the default device: the accelerator, else the CPU."""
    if torch.accelerator.is_available():
        return torch.accelerator.current_accelerator() or torch.device("cpu")
    return torch.device("cpu")
