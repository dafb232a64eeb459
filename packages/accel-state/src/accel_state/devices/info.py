"""Properties of the driver and the kernel, read without initialising CUDA."""

from __future__ import annotations

import logging
import platform
import subprocess
from typing import TYPE_CHECKING

from packaging.version import InvalidVersion, Version

from accel_state.errors import MissingDependencyError

if TYPE_CHECKING:
    from collections.abc import Mapping

# GeForce cards of this generation were sold without peer access, which drivers pretended to offer until then:
# https://docs.nvidia.com/datacenter/tesla/tesla-release-notes-550-54-14/index.html
_NO_PEER_ACCESS = ("RTX 40",)
PEER_ACCESS_DRIVER = Version("550.40.07")
"""The first driver of NVIDIA whose peer-to-peer copies are right on consumer cards."""

_KERNEL = Version("5.5.0")

logger = logging.getLogger(__name__)


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
        MissingDependencyError: There is no NVIDIA driver.
    """
    return nvidia_smi("driver_version")[0]


def check_cuda_p2p_ib_support() -> bool:
    """Return whether the GPUs of this machine support peer-to-peer and InfiniBand transfers.

    Returns:
        False for cards that cannot (`NCCL_P2P_DISABLE=1` and `NCCL_IB_DISABLE=1` help); True otherwise, and
        where there is no GPU to ask.
    """
    names, count = get_gpu_info()
    if count < 2 or not any(card in name for name in names for card in _NO_PEER_ACCESS):
        return True
    try:
        return Version(get_driver_version()) >= PEER_ACCESS_DRIVER
    except InvalidVersion:
        return False


def peer_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that NCCL lacks where GPUs cannot reach each other's memory."""
    missing = {name: "1" for name in ("NCCL_P2P_DISABLE", "NCCL_IB_DISABLE") if name not in variables}
    return missing if missing and not check_cuda_p2p_ib_support() else {}


def check_os_kernel() -> None:
    """Log a warning if the Linux kernel is older than 5.5, with which processes may hang."""
    release = platform.release().split("-")[0]
    if platform.system() != "Linux":
        return
    try:
        old = Version(release) < _KERNEL
    except InvalidVersion:
        return
    if old:
        logger.warning(
            "The kernel of this machine is %s. Processes may hang with kernels before %s: upgrade it.",
            release,
            _KERNEL,
        )


def nvidia_smi(field: str) -> list[str]:
    """Query one field of every GPU.

    Raises:
        MissingDependencyError: There is no NVIDIA driver.
    """
    try:
        answer = subprocess.run(
            ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader"],
            capture_output=True,
            check=True,
            text=True,
        )
    except (OSError, subprocess.CalledProcessError) as error:
        raise MissingDependencyError(
            f"nvidia-smi does not answer ({error}): install the NVIDIA driver, or ask where there is a GPU."
        ) from None
    return [line.strip() for line in answer.stdout.splitlines() if line.strip()]
