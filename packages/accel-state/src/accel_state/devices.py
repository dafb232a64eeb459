"""Choose the device of this process, probe available devices, and pin the process to cores near its GPU."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.distributed as dist

from accel_state.device_kinds import BY_NAME, CPU, KINDS, DeviceKind, available_kind, kind_of
from accel_state.environ import parse_flag_from_env
from accel_state.errors import SettingsError
from accel_state.libraries import ADA, is_torch_version

logger = logging.getLogger(__name__)


def choose_device(
    name: str | None, *, cpu: bool, local_rank: int, local_world_size: int
) -> tuple[DeviceKind, torch.device]:
    """Choose the device of this process.

    `name` is the requested device, such as `"cuda:1"` or `"xpu"` (the index defaults to the local rank), or
    `None` for the best available one.

    Raises:
        SettingsError: The name is not a torch device, or there are fewer devices than processes.

    Example:
        >>> choose_device(None, cpu=True, local_rank=3, local_world_size=4)[1]
        device(type='cpu')
    """
    if cpu:
        return CPU, torch.device("cpu")
    if name is None:
        kind = available_kind()
        _warn_of_old_torch(kind)
        return kind, default_device(kind, local_rank, local_world_size)
    for row in KINDS:
        if row.type == name.partition(":")[0]:
            row.probe()  # torch knows some types only after their plugin is imported
    try:
        device = torch.device(name)
        kind = kind_of(device)
    except (RuntimeError, ValueError) as error:
        raise SettingsError(f"ACCELERATE_TORCH_DEVICE={name!r} is not a device: {error}") from None
    _warn_of_old_torch(kind)
    if device.index is None:
        device = default_device(kind, local_rank, local_world_size)
    return kind, device


SINGLE_DEVICE_TYPES = frozenset({"cpu", "mps"})


def default_device(kind: DeviceKind, local_rank: int, local_world_size: int) -> torch.device:
    """Return the device of one process of a node, for a device family.

    Returns:
        A device with an index, where the family numbers its devices: the local rank, or, if this process is
        the only one on its node, the current device.

    Raises:
        SettingsError: There are fewer devices than processes.
    """
    namespace = kind.module
    if kind.type in SINGLE_DEVICE_TYPES or namespace is None:
        return torch.device(kind.type)
    if kind.name == "hpu":  # a process sees only its own module, whatever the number of that
        return torch.device("hpu", namespace.current_device())
    count = namespace.device_count()
    if local_world_size == 1 and getattr(namespace, "is_initialized", bool)():
        return torch.device(kind.type, namespace.current_device())
    if count <= 1:  # each process sees only its own device, as under Slurm with one GPU per task
        return torch.device(kind.type, 0)
    if local_rank >= count:
        restriction = kind.visible_devices_env and f" ({kind.visible_devices_env} restricts which)"
        raise SettingsError(
            f"The process with local rank {local_rank} has no device: this machine shows {count} "
            f"{kind.name} devices{restriction or ''}. "
            f"Start at most {count} processes per machine."
        )
    return torch.device(kind.type, local_rank)


def register_collectives(kind: DeviceKind) -> None:
    """Register the backend of a device family with torch, where its plugin has not."""
    if kind.collectives_plugin is not None:
        import_module(kind.collectives_plugin)


def set_current_device(device: torch.device) -> None:
    """Make a device the current device of its type; do nothing if the type does not number its devices."""
    if device.index is None or device.type in SINGLE_DEVICE_TYPES:
        return
    set_device = getattr(kind_of(device).module, "set_device", None)
    if set_device is not None:
        set_device(device)


@functools.cache
def _warn_of_old_torch(kind: DeviceKind) -> None:
    """Warn, once, that torch is older than the minimum version of a device family."""
    if kind.least_torch is not None and is_torch_version("<", kind.least_torch):
        logger.warning(
            "torch %s is installed, but accel needs torch %s or newer on %s devices. Training may work, but "
            "copies on streams of their own and groups of some of the ranks can fail: install 'torch>=%s'.",
            *(torch.__version__, kind.name, kind.least_torch, kind.least_torch),
        )


def get_current_device_type() -> tuple[str, str]:
    """Return the type of the best available device, and the distributed type of several processes on it.

    Example:
        >>> device_type, label = get_current_device_type()
        >>> torch.device(device_type).type == device_type
        True
    """
    kind = available_kind()
    return kind.type, kind.distributed_type.value


def is_cuda_available() -> bool:
    """Return whether torch can use an NVIDIA or AMD GPU; CUDA stays uninitialised, for forks."""
    return BY_NAME["cuda"].probe() or BY_NAME["rocm"].probe()


def is_rocm_available() -> bool:
    """Return whether torch can use an AMD GPU."""
    return BY_NAME["rocm"].probe()


def _question(name: str, device: str) -> Callable[..., bool]:
    """Create the function `is_<name>_available` of a device type."""

    def is_available(check_device: bool = False) -> bool:
        kind = BY_NAME[name]
        try:
            return kind.probe() and (not check_device or kind.module.device_count() > 0)
        except RuntimeError:
            return False

    is_available.__name__ = is_available.__qualname__ = f"is_{name}_available"
    is_available.__doc__ = f"""Return whether torch can use {device}.

    Args:
        check_device: Also whether its driver reports one, which initialises the driver.
    """
    return functools.cache(is_available)


is_xpu_available = _question("xpu", "an Intel GPU")
is_npu_available = _question("npu", "a Huawei Ascend NPU")
is_mlu_available = _question("mlu", "a Cambricon MLU")
is_musa_available = _question("musa", "a Moore Threads GPU")
is_sdaa_available = _question("sdaa", "a Tecorigin SDAA device")
is_neuron_available = _question("neuron", "an AWS Neuron device")


def is_xccl_available() -> bool:
    """Return whether torch has XCCL, the process-group backend of Intel GPUs."""
    return dist.is_available() and getattr(dist, "is_xccl_available", bool)()


def is_mps_available(min_version: str = "1.12") -> bool:
    """Return whether torch can use an Apple GPU.

    Args:
        min_version: The minimum version of torch.

    Example:
        >>> is_mps_available("999")
        False
    """
    return is_torch_version(">=", min_version) and torch.backends.mps.is_available()


@functools.cache
def is_hpu_available(init_hccl: bool = False) -> bool:
    """Return whether torch can use an Intel Gaudi.

    Args:
        init_hccl: Also import Gaudi's collectives library, which registers its backend with torch.
    """
    kind = BY_NAME["hpu"]
    is_available = kind.probe()
    if init_hccl and is_available:
        register_collectives(kind)
    return is_available


def is_habana_gaudi1() -> bool:
    """Return whether this machine's Gaudi is of the first generation."""
    kind = BY_NAME["hpu"]
    return kind.probe() and kind.module.get_device_name().upper() == "GAUDI"


@functools.cache
def is_torch_xla_available(check_is_tpu: bool = False, check_is_gpu: bool = False) -> bool:
    """Return whether torch_xla is installed; it is imported only to check for hardware.

    Args:
        check_is_tpu: Also check that its device is a TPU.
        check_is_gpu: Also check that its device is a GPU.

    Raises:
        SettingsError: Both are requested.
    """
    if check_is_tpu and check_is_gpu:
        raise SettingsError("is_torch_xla_available: choose one of check_is_tpu=True and check_is_gpu=True")
    if not BY_NAME["xla"].probe() or not (check_is_tpu or check_is_gpu):
        return BY_NAME["xla"].probe()
    return import_module("torch_xla.runtime").device_type() in ({"TPU"} if check_is_tpu else {"GPU", "CUDA"})


def is_bf16_available(ignore_tpu: bool = False, *, device: torch.device | None = None) -> bool:
    """Return whether a device computes in bfloat16.

    Args:
        ignore_tpu: Return False for XLA devices.
        device: The device; the best available one when `None`.

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
    """Return whether the best available device computes in float16; only the first Gaudi does not."""
    return not is_habana_gaudi1()


@functools.cache
def check_cuda_fp8_capability() -> bool:
    """Return whether the current NVIDIA or AMD GPU computes in float8 (capability 8.9 or newer, as MI300)."""
    return _has_capability(ADA)


# Blackwell; https://docs.nvidia.com/deeplearning/transformer-engine/user-guide/index.html
_CUDA_MXFP8 = (10, 0)


def is_transformer_engine_mxfp8_available() -> bool:
    """Return whether Transformer Engine and a device with block-scaled float8 (MXFP8) are available."""
    return find_spec("transformer_engine") is not None and _has_capability(_CUDA_MXFP8)


def _has_capability(least: tuple[int, int]) -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= least


@functools.cache
def set_numa_affinity(local_process_index: int, verbose: bool | None = None) -> None:
    """Pin this process to the cores near its GPU, once; later calls have no effect."""
    override_numa_affinity(local_process_index, verbose)


def override_numa_affinity(local_process_index: int, verbose: bool | None = None) -> None:
    """Pin this process to the cores near its GPU, even if it is already pinned.

    Only logs a message if there is no CUDA device, or the system does not report which cores are near it.

    Args:
        local_process_index: Local rank, which is also the index of its GPU.
        verbose: Log the cores as information rather than for debugging; by default if
            `ACCELERATE_DEBUG_MODE` is set.
    """
    if verbose is None:
        verbose = parse_flag_from_env("ACCELERATE_DEBUG_MODE", default=False)
    if not is_cuda_available() or not hasattr(os, "sched_setaffinity"):
        logger.info("Not pinned to cores: there is no CUDA device.")
        return
    address = _pci_address(local_process_index)
    cores = near_cores(address) & os.sched_getaffinity(0) if address else set[int]()
    if not cores:
        logger.warning("Not pinned to cores: this machine does not show which cores are near the GPU.")
        return
    os.sched_setaffinity(0, cores)
    level = logging.INFO if verbose else logging.DEBUG
    logger.log(
        level, "Process %d of this machine is pinned to the cores %s.", local_process_index, sorted(cores)
    )


def _pci_address(index: int) -> str | None:
    properties = torch.cuda.get_device_properties(index % torch.cuda.device_count())
    if not hasattr(properties, "pci_bus_id"):  # not in older versions of torch
        return None
    return f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"


_SYSFS = Path("/sys/bus/pci/devices")


def near_cores(address: str, devices: Path = _SYSFS) -> set[int]:
    """Return the cores near a device, by its PCI address (`"0000:3b:00.0"`); none if none are listed."""
    listing = devices / address / "local_cpulist"
    return set(_parse_cpu_list(listing.read_text())) if listing.is_file() else set()


def _parse_cpu_list(cpu_list_str: str) -> list[int]:
    """Parse a list of cores in the notation of the Linux kernel; return their numbers in order.

    Example:
        >>> _parse_cpu_list("0-2,8")
        [0, 1, 2, 8]
    """
    cores: set[int] = set()
    for span in filter(None, cpu_list_str.strip().split(",")):
        first, _, last = span.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return sorted(cores)
