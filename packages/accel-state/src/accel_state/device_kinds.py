"""Table of device families, and driver information, without importing torch.

Settings and the command derive their lists from the table; only its methods import torch.
"""

from __future__ import annotations

import functools
import logging
import platform
import subprocess
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from packaging.version import InvalidVersion, Version

from accel_state.environ import patch_environment
from accel_state.errors import MissingDependencyError
from accel_state.frozen import frozen
from accel_state.labels import DistributedType

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)


@frozen
class DeviceKind:
    """One family of devices.

    Args:
        name: The name of the family; unique.
        type: The `type` of its `torch.device`.
        backend: The process-group backend that moves its tensors; `None` where there is none.
        distributed_type: The distributed type of several processes on such devices.
        visible_devices_env: The variable that restricts which devices a process sees.
        rng_key: The `RNGType` of its random number generator, if it has a separate one.
        plugin: The package that registers the device type with torch, if torch does not know it by itself.
        collectives_plugin: The module that registers the backend with torch, if the plugin does not.
        least_torch: The minimum version of torch; `None` for the minimum in the package's metadata.
        runtime: The module in place of `torch.<type>`, for devices that torch does not know. It also finds
            the ranks (`topology`) and how they connect (`group_options`), creates their `collectives`, and
            executes the recorded operations (`flush`).
    """

    name: str
    type: str
    backend: str | None
    distributed_type: DistributedType
    visible_devices_env: str | None = None
    rng_key: str | None = None
    plugin: str | None = None
    collectives_plugin: str | None = None
    least_torch: str | None = None
    runtime: str | None = None

    @functools.cache  # noqa: B019 - there are a dozen families
    def probe(self) -> bool:
        """Return whether this process can use such a device; CUDA stays uninitialised, for forks."""
        if self.runtime is not None:
            return find_spec(str(self.plugin)) is not None  # importing it would take the devices
        torch = import_module("torch")
        if self.plugin is not None and not hasattr(torch, self.type):
            if find_spec(self.plugin.partition(".")[0]) is None:
                return False
            import_module(self.plugin)
        if self.type == "cuda" and (torch.version.hip is not None) != (self.name == "rocm"):
            return False
        with patch_environment(pytorch_nvml_based_cuda_check="1"):
            return hasattr(torch, self.type) and bool(getattr(torch, self.type).is_available())

    @property
    def module(self) -> Any:
        """The namespace of torch for the device type, such as `torch.cuda`; `None` if it has none."""
        return self.own_runtime or getattr(import_module("torch"), self.type, None)

    @property
    def own_runtime(self) -> Any:
        """The module named by `runtime`; `None` if torch knows the device."""
        return None if self.runtime is None else import_module(self.runtime)

    @property
    def group_backend(self) -> str | None:
        """The `backend` argument of `init_process_group`, for tensors of the device and of the CPU.

        Devices with a `runtime` have separate collectives: their process group serves CPU tensors only.
        """
        if self.runtime is not None:
            return "gloo"
        if self.backend is None or self.type == "cpu":
            return self.backend
        return f"cpu:gloo,{self.type}:{self.backend}"


def _row(
    name: str, backend: str, label: DistributedType, visible: str, plugin: str | None = None, **row: Any
) -> DeviceKind:
    """Create a row; its name is also the type of its devices, its namespace in torch and its RNG key."""
    row = {"type": name, "rng_key": name, "visible_devices_env": visible, "plugin": plugin, **row}
    return DeviceKind(name=name, backend=backend, distributed_type=label, **row)


_CUDA: dict[str, Any] = {"type": "cuda", "rng_key": "cuda", "least_torch": "2.11"}
_HPU: dict[str, Any] = {"collectives_plugin": "habana_frameworks.torch.distributed.hccl"}

KINDS: tuple[DeviceKind, ...] = (
    # First, since torch_npu's `transfer_to_npu` makes it look like CUDA.
    _row("npu", "hccl", DistributedType.MULTI_NPU, "ASCEND_RT_VISIBLE_DEVICES", "torch_npu"),
    _row("cuda", "nccl", DistributedType.MULTI_GPU, "CUDA_VISIBLE_DEVICES", **_CUDA),
    _row("rocm", "nccl", DistributedType.MULTI_GPU, "HIP_VISIBLE_DEVICES", **_CUDA),  # RCCL has NCCL's name
    _row("xpu", "xccl", DistributedType.MULTI_XPU, "ZE_AFFINITY_MASK", least_torch="2.11"),
    DeviceKind(name="mps", type="mps", backend=None, distributed_type=DistributedType.NO),
    _row("mlu", "cncl", DistributedType.MULTI_MLU, "MLU_VISIBLE_DEVICES", "torch_mlu"),
    _row("musa", "mccl", DistributedType.MULTI_MUSA, "MUSA_VISIBLE_DEVICES", "torch_musa"),
    _row("sdaa", "tccl", DistributedType.MULTI_SDAA, "SDAA_VISIBLE_DEVICES", "torch_sdaa"),
    _row(
        "hpu", "hccl", DistributedType.MULTI_HPU, "HABANA_VISIBLE_MODULES", "habana_frameworks.torch", **_HPU
    ),
    _row("neuron", "neuron", DistributedType.MULTI_NEURON, "NEURON_RT_VISIBLE_CORES", "torch_neuronx"),
    _row(
        "xla", "xla", DistributedType.XLA, "TPU_VISIBLE_CHIPS", "torch_xla", runtime="accel_state.xla_devices"
    ),
    DeviceKind(name="cpu", type="cpu", backend="gloo", distributed_type=DistributedType.MULTI_CPU),
)
"""All families in probe order; the CPU, which always works, is last."""

WITHOUT_STORAGE = frozenset(kind.type for kind in KINDS if kind.runtime is not None)
"""Types of devices whose tensors have no addressable storage."""

BY_NAME = {kind.name: kind for kind in KINDS}
CPU = BY_NAME["cpu"]


def available_kind() -> DeviceKind:
    """Return the first family of `KINDS` with a device that this process can use.

    Where that is the CPU, an accelerator of a type that has no row, but that torch can use, comes first.

    Example:
        >>> available_kind().probe()
        True
    """
    kind = next(kind for kind in KINDS if kind.probe())
    return kind if kind != CPU else _unlisted_kind() or CPU


def _unlisted_kind(device_type: str | None = None) -> Any:
    """Create the family of torch's accelerator (of this type) if it has no row; `None` if there is none.

    It has the label of a GPU, as clients of accel know no label of its own.
    """
    torch, dist = import_module("torch"), import_module("torch.distributed")
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if device is None or device_type not in {None, device.type} or device.type in {k.type for k in KINDS}:
        return None
    backends = dist.Backend.default_device_backend_map if dist.is_available() else {}
    return DeviceKind(
        name=device.type,
        type=device.type,
        backend=backends.get(device.type),
        distributed_type=DistributedType.MULTI_GPU,
    )


def kind_of(device: torch.device) -> DeviceKind:
    """Return the family of a device.

    Raises:
        ValueError: No family has devices of this type, and it is not torch's accelerator.

    Example:
        >>> import torch
        >>> kind_of(torch.device("cpu")).backend
        'gloo'
    """
    rows = [kind for kind in KINDS if kind.type == device.type]
    if kind := next(
        (kind for kind in rows if kind.probe()), rows[0] if rows else _unlisted_kind(device.type)
    ):
        return kind
    known = ", ".join(dict.fromkeys(kind.type for kind in KINDS))
    raise ValueError(f"There is no device family for {str(device)!r}: known types are {known}.")


def runtime_module(device: torch.device) -> Any:
    """Return the module in place of `torch.<type>` for a device that torch does not know, else `None`.

    Example:
        >>> import torch
        >>> runtime_module(torch.device("cpu")) is None
        True
    """
    return next((kind.own_runtime for kind in KINDS if kind.type == device.type), None)


# GeForce cards of this generation lack peer access, which drivers before this version claimed to offer:
# https://docs.nvidia.com/datacenter/tesla/tesla-release-notes-550-54-14/index.html
_NO_PEER_ACCESS = ("RTX 40",)
PEER_ACCESS_DRIVER = Version("550.40.07")
"""The first NVIDIA driver whose peer-to-peer copies are correct on consumer cards."""

_KERNEL = Version("5.5.0")


def get_gpu_info() -> tuple[list[str], int]:
    """Return the names of the NVIDIA GPUs of this machine, and their number; 0 without a driver."""
    try:
        names = nvidia_smi("name")
    except MissingDependencyError:
        return [], 0
    return names, len(names)


def get_driver_version() -> str:
    """Return the version of the NVIDIA driver, such as `"550.54.14"`.

    Raises:
        MissingDependencyError: No NVIDIA driver is installed.
    """
    return nvidia_smi("driver_version")[0]


def check_cuda_p2p_ib_support() -> bool:
    """Return whether the GPUs of this machine support peer-to-peer and InfiniBand transfers.

    Returns:
        False for cards that do not (set `NCCL_P2P_DISABLE=1` and `NCCL_IB_DISABLE=1`); True otherwise, even
            without a GPU.
    """
    names, count = get_gpu_info()
    if count < 2 or not any(card in name for name in names for card in _NO_PEER_ACCESS):
        return True
    try:
        return Version(get_driver_version()) >= PEER_ACCESS_DRIVER
    except InvalidVersion:
        return False


def peer_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the NCCL variables that must still be set because GPUs cannot access each other's memory."""
    missing = {name: "1" for name in ("NCCL_P2P_DISABLE", "NCCL_IB_DISABLE") if name not in variables}
    return missing if missing and not check_cuda_p2p_ib_support() else {}


def check_os_kernel() -> None:
    """Log a warning if the Linux kernel is older than 5.5, with which processes may hang."""
    release = platform.release().split("-")[0]
    try:
        is_old = platform.system() == "Linux" and Version(release) < _KERNEL
    except InvalidVersion:
        return
    if is_old:
        logger.warning(  # programs read `record.msg`
            f"The kernel of this machine is {release}. Processes may hang with kernels before {_KERNEL}: "  # noqa: G004
            "upgrade it."
        )


_DRIVER_SECONDS = 60
"""How long a driver may take to answer; one that is stuck never does."""


def nvidia_smi(field: str) -> list[str]:
    """Query one field of every GPU.

    Raises:
        MissingDependencyError: No NVIDIA driver is installed.
    """
    try:
        answer = subprocess.run(
            ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader"],
            capture_output=True,
            check=True,
            text=True,
            timeout=_DRIVER_SECONDS,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise MissingDependencyError(
            f"nvidia-smi does not respond ({error}): install the NVIDIA driver, or use a machine with a GPU."
        ) from None
    return [line.strip() for line in answer.stdout.splitlines() if line.strip()]
