"""What the command knows about this machine without torch: its accelerators and its cores."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

from accel_state.available import is_installed
from accel_state.devices.info import nvidia_smi, peer_variables
from accel_state.devices.kinds import KINDS
from accel_state.errors import MissingDependencyError
from accel_state.fp8_backends import BACKENDS, BY_NAME

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

VISIBLE_DEVICES: Mapping[str, str] = {
    kind.distributed_type.value: kind.visible_devices_env
    for kind in reversed(KINDS)  # of two families with one label, the first of the table counts
    if kind.visible_devices_env is not None and kind.runtime is None
}
"""By label of a device family, the variable that restricts which of its devices a process sees."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The properties of this machine that launching needs.

    Args:
        gpus: How many NVIDIA or AMD GPUs a process may see.
        cores: How many CPU cores it may use.
        installed: How many such GPUs it has, also those that the environment hides; as many as it may see if
            nobody says.
        hosts: The machines of a DeepSpeed hostfile and how many processes each runs, if there is one.
        mpirun: What `mpirun --version` says; None where it is not asked or not there.
        commands: What the command file of a TPU pod says.
        alias: The folder by which Python finds the start of accel-compat; None if that is not installed.
        capability: Asks for the least compute capability of its NVIDIA GPUs, where it matters.
        peer_variables: Asks which variables NCCL needs on its NVIDIA GPUs, besides those of an environment.
        fp8_backends: Which libraries for FP8 are installed; all if nobody says.
        has_megatron: Whether megatron-core is installed.
    """

    gpus: int
    cores: int
    installed: int = -1
    hosts: Mapping[str, int] | None = None
    mpirun: str | None = None
    commands: tuple[str, ...] = ()
    alias: str | None = None
    capability: Callable[[], tuple[int, int] | None] = lambda: None
    peer_variables: Callable[[Mapping[str, str]], Mapping[str, str]] = lambda _: {}
    fp8_backends: tuple[str, ...] = tuple(BY_NAME)
    has_megatron: bool = True

    def __post_init__(self) -> None:
        """Fill in defaults."""
        if self.installed < 0:
            object.__setattr__(self, "installed", self.gpus)


def this_machine(environ: Mapping[str, str]) -> Machine:
    """Probe this machine."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    installed = _present()
    return Machine(
        gpus=count_gpus(environ, installed),
        cores=cores,
        installed=installed,
        alias=_alias(),
        capability=_capability,
        peer_variables=peer_variables,
        fp8_backends=tuple(one.name for one in BACKENDS if is_installed(one.library)),
        has_megatron=is_installed("megatron_lm"),
    )


def _capability() -> tuple[int, int] | None:
    """Return the least compute capability of the GPUs, from `nvidia-smi`."""
    found: list[tuple[int, int]] = []
    for line in ask_nvidia("compute_cap"):
        major, _, minor = line.partition(".")
        if major.isdecimal() and minor.isdecimal():
            found.append((int(major), int(minor)))
    return min(found, default=None)


def _alias() -> str | None:
    """Where accel-compat starts a process; it lies above this package, and is not imported."""
    found = find_spec("accel_compat")
    return str(Path(found.origin).with_name("startup")) if found is not None and found.origin else None


def count_gpus(environ: Mapping[str, str], installed: int) -> int:
    """Return the number of GPUs that torch would see.

    Args:
        environ: The environment: each of CUDA_VISIBLE_DEVICES, HIP_VISIBLE_DEVICES and
            ROCR_VISIBLE_DEVICES may narrow the choice.
        installed: The number that the machine has.

    Example:
        >>> count_gpus({"CUDA_VISIBLE_DEVICES": "0,3"}, 8), count_gpus({}, 8)
        (2, 8)
    """
    names = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
    return min([installed, *(_visible(environ[name]) for name in names if name in environ)])


def _visible(text: str) -> int:
    """Count a list of devices; like the driver, stop at the first entry that is no device."""
    entries = map(str.strip, text.split(","))
    return len([*takewhile(lambda entry: entry and not entry.startswith("-"), entries)])


def _nvidia(root: Path = Path("/")) -> int:
    """The driver lists its GPUs in /proc; where that is missing (Windows, WSL), its tool does.

    In a container /proc is the host's, and the device files are those of the GPUs that the container has.
    """
    folder = root / "proc/driver/nvidia/gpus"
    if not folder.is_dir():
        return len(ask_nvidia("name"))
    return min(len(list(folder.iterdir())), len(list((root / "dev").glob("nvidia[0-9]*"))))


def ask_nvidia(field: str) -> list[str]:
    """Return a field of every NVIDIA GPU; none where the driver's tool is not there, or has no answer."""
    with suppress(MissingDependencyError):
        return nvidia_smi(field)
    return []


def _amd() -> int:
    """The nodes of the kernel driver's topology that have SIMD units; the others are CPUs."""
    nodes = Path("/sys/class/kfd/kfd/topology/nodes").glob("*/properties")
    return len([node for node in nodes if re.search("^simd_count [1-9]", node.read_text(), re.MULTILINE)])


def _present() -> int:
    return _nvidia() or _amd()
