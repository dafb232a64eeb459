"""Probe this host: its GPUs, cores and libraries. Read the hostfiles of DeepSpeed and MPI."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import entry_points
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path

from accel_state import platforms
from accel_state.device_kinds import KINDS, nvidia_smi, peer_variables
from accel_state.errors import MissingDependencyError, SettingsError
from accel_state.frozen import frozen
from accel_state.libraries import BACKENDS, BY_NAME, is_installed


@frozen
class HostDevices:
    """The properties of this machine that launching needs.

    Args:
        gpus: Number of devices visible to a process: NVIDIA or AMD GPUs, or without these, others.
        cores: Number of usable CPU cores.
        installed: Number of installed GPUs, including hidden ones; `gpus` by default.
        hosts: The nodes of a DeepSpeed hostfile with their numbers of processes, if there is one.
        mpi_machines: The machines of an MPI hostfile, if there is one.
        mpirun: The output of `mpirun --version`; None if it is not needed or not installed.
        commands: The lines of the command file of a TPU pod.
        alias: The folder that activates accel-compat on PYTHONPATH; None if accel-compat is not installed.
        capability: Queries the lowest compute capability of its NVIDIA GPUs.
        peer_variables: Queries the variables that NCCL needs in addition to an environment.
        fp8_backends: The installed libraries for FP8; all by default.
        engines: The sections of the settings of engines whose library is installed; all by default.
        kind: The distributed type of its devices.
        visible_devices: The variable that restricts which of them a process sees.
    """

    gpus: int
    cores: int
    installed: int = -1
    hosts: Mapping[str, int] | None = None
    mpi_machines: tuple[str, ...] = ()
    mpirun: str | None = None
    commands: tuple[str, ...] = ()
    alias: str | None = None
    capability: Callable[[], tuple[int, int] | None] = lambda: None
    peer_variables: Callable[[Mapping[str, str]], Mapping[str, str]] = lambda _: {}
    fp8_backends: tuple[str, ...] = tuple(BY_NAME)
    engines: tuple[str, ...] = ("deepspeed", "megatron")
    kind: str = "MULTI_GPU"
    visible_devices: str | None = "CUDA_VISIBLE_DEVICES"

    def __post_init__(self) -> None:
        if self.installed < 0:
            object.__setattr__(self, "installed", self.gpus)


def probe_devices(environ: Mapping[str, str], *, ask_torch: bool = True) -> HostDevices:
    """Probe this machine.

    Args:
        environ: The environment, whose variables may hide devices.
        ask_torch: Without an NVIDIA or AMD GPU, look for devices of other kinds, which may import torch in a
            child process.
    """
    installed, kind, variable = count_nvidia_gpus() or _count_amd_gpus(), "MULTI_GPU", "CUDA_VISIBLE_DEVICES"
    gpus = count_gpus(environ, installed)
    if not installed and ask_torch:
        installed, kind, variable = _count_others(environ)
        gpus = count_gpus(environ, installed, (variable,) if variable else ())
    compat = find_spec("accel_compat")  # A dependent package, which is not imported.
    return HostDevices(
        gpus=gpus,
        cores=count_cores(),
        installed=installed,
        alias=str(Path(compat.origin).with_name("startup")) if compat and compat.origin else None,
        capability=_least_capability,
        peer_variables=peer_variables,
        fp8_backends=tuple(backend.name for backend in BACKENDS if is_installed(backend.library)),
        engines=tuple(section for section, library in _LIBRARIES.items() if is_installed(library)),
        kind=kind,
        visible_devices=variable,
    )


def _count_others(environ: Mapping[str, str]) -> tuple[int, str, str | None]:
    """Return the number of devices that are no NVIDIA or AMD GPUs, their kind, and their variable.

    Only if torch may know one, a child process imports it to look for them.
    """
    plugins = [kind.plugin for kind in KINDS if kind.plugin is not None and kind.runtime is None]
    if not (
        any(find_spec(plugin.partition(".")[0]) is not None for plugin in plugins)
        or entry_points(group="torch.backends")
        or platforms.SYSTEM in {"darwin", "win32"}
        or next(Path("/dev/dri").glob("renderD*"), None) is not None  # of Intel
    ):
        return 0, "MULTI_GPU", "CUDA_VISIBLE_DEVICES"
    hiding = {kind.visible_devices_env for kind in KINDS}
    done = subprocess.run(
        [sys.executable, "-c", _COUNT],
        env={name: value for name, value in environ.items() if name not in hiding},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        return 0, "MULTI_GPU", "CUDA_VISIBLE_DEVICES"
    count, kind, variable = json.loads(done.stdout.splitlines()[-1])
    return count, kind, variable


_COUNT = """\
import json
from accel_state.device_kinds import available_kind
kind = available_kind()
count = 0 if kind.type == "cpu" or kind.runtime else kind.module.device_count()
print()
print(json.dumps([count, kind.distributed_type.value, kind.visible_devices_env]))
"""
"""Print what the devices of this machine are."""


_LIBRARIES = {"deepspeed": "deepspeed", "megatron": "megatron_lm"}
"""The library of each engine, by its section of the settings."""


def count_cores() -> int:
    """Return the number of CPU cores that this process may use, by its affinity and its container's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, cpu_quota() or cores)


def cpu_quota(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Return the cores that the control group of a container allows; None without a limit."""
    with suppress(OSError, ValueError):
        quota, period = (root / "cpu.max").read_text(encoding="ascii").split()
        return None if quota == "max" else max(1, math.ceil(int(quota) / int(period)))
    with suppress(OSError, ValueError):  # version 1
        quota, period = (
            int((root / "cpu" / f"cpu.cfs_{name}_us").read_text(encoding="ascii"))
            for name in ("quota", "period")
        )
        return None if quota < 0 else max(1, math.ceil(quota / period))
    return None


def count_gpus(
    environ: Mapping[str, str],
    installed: int,
    variables: Sequence[str] = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
) -> int:
    """Return the number of GPUs that torch would see.

    Args:
        environ: The environment.
        installed: The number of installed GPUs.
        variables: The variables that may hide devices.
    """
    counts = [installed]
    for name in variables:
        if name in environ:  # The driver reads a list up to the first invalid entry.
            entries = map(str.strip, environ[name].split(","))
            counts.append(len([*takewhile(lambda entry: _is_device(entry, installed), entries)]))
    return min(counts)


def _is_device(entry: str, installed: int) -> bool:
    """Return whether an entry of visible devices may be one: a number (of a tile), or an identifier."""
    number = entry.partition(".")[0].partition(":")[0]
    return int(number) < installed if number.isdecimal() else "-" in entry[1:]


def count_nvidia_gpus(root: Path = Path("/")) -> int:
    """Count the GPUs that the driver lists in /proc, or without it (Windows, WSL), in `nvidia-smi`.

    In a container /proc is the host's, and only the container's GPUs have device files.
    """
    folder = root / "proc/driver/nvidia/gpus"
    if not folder.is_dir():
        return len(query_nvidia("name"))
    return min(len(list(folder.iterdir())), len(list((root / "dev").glob("nvidia[0-9]*"))))


def _count_amd_gpus(root: Path = Path("/")) -> int:
    """Count the nodes of the kernel driver's topology that have SIMD units; CPUs have none.

    In a container, the properties of the host's other GPUs cannot be read, and they have no device files.
    """
    count = 0
    for node in root.glob("sys/class/kfd/kfd/topology/nodes/*/properties"):
        with suppress(OSError):
            count += re.search("^simd_count [1-9]", node.read_text(), re.MULTILINE) is not None
    return min(count, len(list((root / "dev/dri").glob("renderD*"))))


def _least_capability() -> tuple[int, int] | None:
    """Return the lowest compute capability of the GPUs, from `nvidia-smi`."""
    matches = [match for line in query_nvidia("compute_cap") if (match := re.match(r"(\d+)\.(\d+)$", line))]
    return min(((int(match[1]), int(match[2])) for match in matches), default=None)


def query_nvidia(field: str) -> list[str]:
    """Return a field of every NVIDIA GPU; an empty list if `nvidia-smi` is absent or fails."""
    with suppress(MissingDependencyError):
        return nvidia_smi(field)
    return []


VISIBLE_DEVICES: Mapping[str, str] = {
    kind.distributed_type.value: kind.visible_devices_env
    for kind in reversed(KINDS)  # of families with the same label, the first of the table counts
    if kind.visible_devices_env is not None and kind.runtime is None
}
"""The variable that restricts the visible devices, by distributed type."""


def visible_devices_variable(machine: HostDevices, distributed_type: str | None) -> str:
    """Return the variable that restricts the visible devices of a launch.

    FSDP and DeepSpeed, and `MULTI_GPU` as in the reference, mean the devices that the machine has.
    """
    own = machine.visible_devices or "CUDA_VISIBLE_DEVICES"
    return own if distributed_type in {None, "MULTI_GPU"} else VISIBLE_DEVICES.get(str(distributed_type), own)


def read_hosts(file: str, inclusion: str | None = None, exclusion: str | None = None) -> dict[str, int]:
    """Read a DeepSpeed hostfile."""
    return filter_hosts(parse_hosts(read_lines(file, "hostfile"), file), inclusion, exclusion)


def parse_hosts(lines: Sequence[str], source: str) -> dict[str, int]:
    """Parse the lines of a DeepSpeed hostfile.

    Raises:
        SettingsError: A line is invalid, or a machine occurs twice; the message has the line number.

    Example:
        >>> parse_hosts(["worker-1 slots=4", "worker-2 slots=8  # large"], "hosts")
        {'worker-1': 4, 'worker-2': 8}
    """
    slots: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        match = _LINE.fullmatch(text)
        if match is None or match["host"] in slots:
            expected = "that machine is already listed" if match else "expected `<machine> slots=<number>`"
            raise SettingsError(
                f"line {number} of hostfile {source!r} is {line.strip()[:100]!r}: {expected}."
            )
        slots[match["host"]] = int(match["slots"])
    if not slots:
        raise SettingsError(f"hostfile {source!r} names no machine.")
    return slots


_LINE = re.compile(r"(?P<host>[^\s:=]+)\s+slots\s*=\s*(?P<slots>\d{1,9})\s*")


def filter_hosts(
    hosts: Mapping[str, int], inclusion: str | None = None, exclusion: str | None = None
) -> dict[str, int]:
    """Apply DeepSpeed's inclusion or exclusion filter to hosts.

    Args:
        hosts: Machines and their numbers of slots.
        inclusion: Machines to use, separated by `@`, each followed by `:` and its slots unless all are used.
        exclusion: Machines and slots not to use, in the same format.

    Raises:
        SettingsError: A filter contains an unknown machine, or leaves none.

    Example:
        >>> hosts = {"a": 4, "b": 4}
        >>> filter_hosts(hosts, inclusion="b:0,2"), filter_hosts(hosts, exclusion="a@b:3")
        ({'b': 2}, {'b': 3})
    """
    included = (
        _parse_filter(inclusion, hosts) if inclusion else {host: set(range(hosts[host])) for host in hosts}
    )
    excluded = _parse_filter(exclusion, hosts) if exclusion else {}
    counts = {host: len(included.get(host, set()) - excluded.get(host, set())) for host in hosts}
    if not any(counts.values()):
        raise SettingsError("the filters exclude all machines of the hostfile.")
    return {host: number for host, number in counts.items() if number}


def _parse_filter(text: str, hosts: Mapping[str, int]) -> dict[str, set[int]]:
    """Return the slots that a filter names, by machine."""
    named: dict[str, set[int]] = {}
    for part in text.split("@"):
        host, colon, numbers = part.strip().partition(":")
        if host not in hosts:
            raise SettingsError(
                f"the filter {text!r} names the machine {host!r}; the hostfile has {', '.join(hosts)}."
            )
        try:
            slots = set(map(int, numbers.split(","))) if colon else set(range(hosts[host]))
        except ValueError:
            raise SettingsError(f"the filter {text!r}: {numbers!r} are not slot numbers.") from None
        named.setdefault(host, set()).update(slots)
    return named


def mpi_machines(file: str) -> tuple[str, ...]:
    """Return the machines of an MPI hostfile."""
    lines = (line.partition("#")[0].split() for line in read_lines(file, "hostfile"))
    machines = tuple(dict.fromkeys(words[0].partition(":")[0] for words in lines if words))
    if not machines:
        raise SettingsError(f"hostfile {file!r} names no machine.")
    return machines


def read_commands(file: str, what: str) -> list[str]:
    """Read the lines of a file of commands, without comments and empty lines."""
    return [line for line in map(str.strip, read_lines(file, what)) if line and not line.startswith("#")]


def read_lines(file: str, what: str) -> list[str]:
    """Read the lines of a text file."""
    try:
        return Path(file).expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise SettingsError(f"{what} {file!r} cannot be read: {reason}.") from None
