"""Which devices this process can use, and in which number formats they compute."""

from __future__ import annotations

import functools
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from packaging.version import Version

from accel_state.devices.kinds import BY_NAME, available_kind
from accel_state.environ import patch_environment
from accel_state.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Callable

_CUDA_FP8 = (8, 9)  # Ada; https://docs.nvidia.com/deeplearning/transformer-engine/user-guide/index.html
_CUDA_MXFP8 = (10, 0)  # Blackwell; the same page


def _answers(name: str) -> bool:
    """Whether the driver of a kind of device tells of at least one."""
    try:
        return BY_NAME[name].module.device_count() > 0
    except RuntimeError:
        return False


@functools.cache
def is_cuda_available() -> bool:
    """Whether torch can use an NVIDIA or AMD GPU; leaves CUDA uninitialised, so that one may still fork."""
    with patch_environment(pytorch_nvml_based_cuda_check="1"):
        return torch.cuda.is_available()


def is_nvidia() -> bool:
    """Whether torch can use an NVIDIA GPU."""
    return torch.version.hip is None and is_cuda_available()


def is_rocm_available() -> bool:
    """Whether torch can use an AMD GPU."""
    return torch.version.hip is not None and is_cuda_available()


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


def _question(name: str, device: str) -> Callable[..., bool]:
    """Make `is_<name>_available` of a kind of device."""

    def is_available(check_device: bool = False) -> bool:
        return BY_NAME[name].probe() and (not check_device or _answers(name))

    is_available.__name__ = is_available.__qualname__ = f"is_{name}_available"
    is_available.__doc__ = f"""Whether torch can use {device}.

    Args:
        check_device: Also whether its driver tells of one, which initialises the driver.
    """
    return functools.cache(is_available)


is_xpu_available = _question("xpu", "an Intel GPU")
is_npu_available = _question("npu", "a Huawei Ascend NPU")
is_mlu_available = _question("mlu", "a Cambricon MLU")
is_musa_available = _question("musa", "a Moore Threads GPU")
is_sdaa_available = _question("sdaa", "a Tecorigin SDAA device")
is_neuron_available = _question("neuron", "an AWS Neuron device")


def is_xccl_available() -> bool:
    """Whether torch has the backend with which Intel GPUs talk to each other."""
    return dist.is_available() and getattr(dist, "is_xccl_available", bool)()


def is_mps_available(min_version: str = "1.12") -> bool:
    """Whether torch can use an Apple GPU.

    Args:
        min_version: The oldest torch that will do.

    Example:
        >>> is_mps_available("999")
        False
    """
    is_enough = Version(Version(torch.__version__).base_version) >= Version(min_version)
    return is_enough and torch.backends.mps.is_available()


@functools.cache
def is_hpu_available(init_hccl: bool = False) -> bool:
    """Whether torch can use an Intel Gaudi.

    Args:
        init_hccl: Also import Gaudi's library of collectives, which registers its backend with torch.
    """
    if init_hccl and BY_NAME["hpu"].probe():
        import_module("habana_frameworks.torch.distributed.hccl")
    return BY_NAME["hpu"].probe()


def is_habana_gaudi1() -> bool:
    """Whether this machine's Gaudi is of the first generation."""
    kind = BY_NAME["hpu"]
    return kind.probe() and kind.module.get_device_name().upper() == "GAUDI"


def has_xla() -> bool:
    """Whether torch_xla is installed; it is not imported."""
    return find_spec("torch_xla") is not None


@functools.cache
def is_torch_xla_available(check_is_tpu: bool = False, check_is_gpu: bool = False) -> bool:
    """Whether torch_xla is installed; it is imported only to check for hardware.

    Args:
        check_is_tpu: Whether it also drives a TPU.
        check_is_gpu: Whether it also drives a GPU.

    Raises:
        SettingsError: Both are asked for.
    """
    if check_is_tpu and check_is_gpu:
        raise SettingsError("is_torch_xla_available: choose one of check_is_tpu=True and check_is_gpu=True")
    if not has_xla():
        return False
    wanted = {"TPU"} if check_is_tpu else {"GPU", "CUDA"} if check_is_gpu else None
    return wanted is None or import_module("torch_xla.runtime").device_type() in wanted


def is_bf16_available(ignore_tpu: bool = False, *, device: torch.device | None = None) -> bool:
    """Whether a device computes in bfloat16.

    Args:
        ignore_tpu: Answer no for XLA devices.
        device: The device; the best that is there when `None`.

    Example:
        >>> is_bf16_available(device=torch.device("cpu"))
        True
    """
    device_type = available_kind().type if device is None else device.type
    if device_type == "xla":
        return not ignore_tpu
    if device_type == "cuda":
        return torch.cuda.is_bf16_supported()
    if device_type == "mps":
        return torch.backends.mps.is_macos_or_newer(14, 0)
    return True


def is_fp16_available() -> bool:
    """Whether the best device that is there computes in float16; the first Gaudi alone does not."""
    return not is_habana_gaudi1()


@functools.cache
def check_cuda_fp8_capability() -> bool:
    """Whether the current device, if it is CUDA's, computes in float8 (compute capability 8.9 or newer)."""
    return _has_capability(_CUDA_FP8)


def is_transformer_engine_mxfp8_available() -> bool:
    """Whether Transformer Engine is there, and a device that scales float8 in blocks (MXFP8)."""
    return find_spec("transformer_engine") is not None and _has_capability(_CUDA_MXFP8)


def get_current_device_type() -> tuple[str, str]:
    """The best device type that is there, and what several processes on it are called.

    Example:
        >>> device_type, label = get_current_device_type()
        >>> torch.device(device_type).type == device_type
        True
    """
    kind = available_kind()
    return kind.type, kind.distributed_type.value


def _has_capability(least: tuple[int, int]) -> bool:
    return BY_NAME["cuda"].probe() and torch.cuda.get_device_capability() >= least
