"""The probes of the table of device families: which of them torch can use in this process."""

from __future__ import annotations

import functools
from importlib import import_module
from importlib.util import find_spec

import torch

from accel_state.environ import patch_environment


@functools.cache
def has_cuda() -> bool:
    """Whether torch can use an NVIDIA or AMD GPU; creates no CUDA context, so that one may still fork."""
    with patch_environment(pytorch_nvml_based_cuda_check="1"):
        return torch.cuda.is_available()


def is_nvidia() -> bool:
    """Whether torch can use an NVIDIA GPU."""
    return torch.version.hip is None and has_cuda()


def is_amd() -> bool:
    """Whether torch can use an AMD GPU."""
    return torch.version.hip is not None and has_cuda()


def is_mps() -> bool:
    """Whether torch can use an Apple GPU."""
    return torch.backends.mps.is_available()


def is_xla() -> bool:
    """Whether torch_xla is installed; it is not imported."""
    return find_spec("torch_xla") is not None


@functools.cache
def has_device(device_type: str, plugin: str | None = None) -> bool:
    """Whether torch can use a device of a type that answers `torch.<type>.is_available()`.

    Args:
        device_type: Such as `"xpu"` or `"npu"`.
        plugin: The package to import first where torch does not know the type by itself.
    """
    if plugin is not None and not hasattr(torch, device_type):
        if find_spec(plugin.partition(".")[0]) is None:
            return False
        import_module(plugin)
    namespace = getattr(torch, device_type, None)
    return namespace is not None and bool(namespace.is_available())
