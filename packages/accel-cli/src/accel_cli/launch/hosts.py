"""Probe this host: its GPUs, cores and libraries. Read the hostfiles of DeepSpeed and MPI."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path

from accel_state.device_kinds import KINDS, nvidia_smi, peer_variables
from accel_state.errors import MissingDependencyError, SettingsError
from accel_state.files import read_regular
from accel_state.frozen import frozen
from accel_state.libraries import BACKENDS, BY_NAME, is_installed


@frozen
class HostDevices:
    """The properties of this machine that launching needs.

    Args:
        gpus: Number of NVIDIA or AMD GPUs visible to a process.
        cores: Number of usable CPU cores.
        installed: Number of installed GPUs, including hidden ones; `gpus` by default.
        hosts: The nodes of a DeepSpeed hostfile with their numbers of processes, if there is one.
        mpirun: The output of `mpirun --version`; None if it is not needed or not installed.
        commands: The lines of the command file of a TPU pod.
        alias: The folder that activates accel-compat on PYTHONPATH; None if accel-compat is not installed.
        capability: Queries the lowest compute capability of its NVIDIA GPUs.
        peer_variables: Queries the variables that NCCL needs in addition to an environment.
        fp8_backends: The installed libraries for FP8; all by default.
        engines: The sections of the settings of engines whose library is installed; all by default.
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
    engines: tuple[str, ...] = ("deepspeed", "megatron")

    def __post_init__(self) -> None:
        if self.installed < 0:
            object.__setattr__(self, "installed", self.gpus)


def probe_devices(environ: Mapping[str, str]) -> HostDevices:
    """Probe this machine."""
    installed = count_nvidia_gpus() or _count_amd_gpus()
    compat = find_spec("accel_compat")  # A dependent package, which is not imported.
    return HostDevices(
        gpus=count_gpus(environ, installed),
        cores=count_cores(),
        installed=installed,
        alias=str(Path(compat.origin).with_name("startup")) if compat and compat.origin else None,
        capability=_least_capability,
        peer_variables=peer_variables,
        fp8_backends=tuple(backend.name for backend in BACKENDS if is_installed(backend.library)),
        engines=tuple(section for section, library in _LIBRARIES.items() if is_installed(library)),
    )


_LIBRARIES = {"deepspeed": "deepspeed", "megatron": "megatron_lm"}
"""The library of each engine, by its section of the settings."""


def count_cores(root: Path = Path("/")) -> int:
    """Return the number of CPU cores that this process may use, by its affinity and its container's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with suppress(OSError, ValueError):  # "max 100000", or microseconds of computing and of a period
        quota, period = (root / "sys/fs/cgroup/cpu.max").read_text().split()
        cores = min(cores, max(1, int(quota) // int(period)))
    return cores


def count_gpus(environ: Mapping[str, str], installed: int) -> int:
    """Return the number of GPUs that torch would see.

    Args:
        environ: The environment: each of CUDA_VISIBLE_DEVICES, HIP_VISIBLE_DEVICES and
            ROCR_VISIBLE_DEVICES may hide devices.
        installed: The number of installed GPUs.

    Example:
        >>> count_gpus({"CUDA_VISIBLE_DEVICES": "0,3"}, 8), count_gpus({}, 8)
        (2, 8)
    """
    counts = [installed]
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        if name in environ:  # The driver reads a list up to the first invalid entry.
            entries = map(str.strip, environ[name].split(","))
            counts.append(len([*takewhile(lambda entry: entry and not entry.startswith("-"), entries)]))
    return min(counts)


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


def read_hosts(file: str, inclusion: str | None = None, exclusion: str | None = None) -> dict[str, int]:
    """Read a DeepSpeed hostfile.

    Raises:
        SettingsError: The file is invalid, or a filter contains a machine or slot that is not in it.
    """
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


_LINE = re.compile(r"(?P<host>[^\s:=]+)\s+slots\s*=\s*(?P<slots>\d{1,4})\s*")


def filter_hosts(
    hosts: Mapping[str, int], inclusion: str | None = None, exclusion: str | None = None
) -> dict[str, int]:
    """Apply DeepSpeed's inclusion or exclusion filter to hosts.

    Args:
        hosts: Machines and their numbers of slots.
        inclusion: Machines to use, separated by `@`, each followed by `:` and its slots unless all are used.
        exclusion: Machines and slots not to use, in the same format.

    Raises:
        SettingsError: A filter contains an unknown machine or slot, or leaves none.

    Example:
        >>> hosts = {"a": 4, "b": 4}
        >>> filter_hosts(hosts, inclusion="b:0,2"), filter_hosts(hosts, exclusion="a@b:3")
        ({'b': 2}, {'b': 3})
    """
    slots = {host: set(range(number)) for host, number in hosts.items()}
    if inclusion:
        chosen = _parse_filter(inclusion, slots, "inclusion")
        slots = {host: chosen[host] for host in slots if host in chosen}
    if exclusion:
        dropped = _parse_filter(exclusion, slots, "exclusion")
        slots = {host: used - dropped.get(host, set()) for host, used in slots.items()}
    result = {host: len(used) for host, used in slots.items() if used}
    if not result:
        raise SettingsError("the filters exclude all machines of the hostfile.")
    return result


def _parse_filter(text: str, slots: Mapping[str, set[int]], kind: str) -> dict[str, set[int]]:
    selected: dict[str, set[int]] = {}
    for part in text.split("@"):
        host, colon, numbers = part.strip().partition(":")
        if host not in slots:
            raise SettingsError(
                f"the {kind} filter {text!r} names the machine {host!r}; the hostfile has {', '.join(slots)}."
            )
        try:
            chosen = {int(number) for number in numbers.split(",")} if colon else slots[host]
        except ValueError:
            raise SettingsError(f"the {kind} filter {text!r}: {numbers!r} are not slot numbers.") from None
        if not chosen <= slots[host]:
            raise SettingsError(
                f"the {kind} filter {text!r} names slots that {host!r} does not have: "
                f"{sorted(chosen - slots[host])}."
            )
        selected[host] = selected.get(host, set()) | chosen
    return selected


def first_machine(file: str) -> str:
    """Return the first machine in an MPI hostfile.

    Raises:
        SettingsError: The file cannot be read, or is empty.
    """
    for line in read_lines(file, "hostfile"):
        if words := line.partition("#")[0].split():
            return words[0].partition(":")[0]
    raise SettingsError(f"hostfile {file!r} names no machine.")


def read_commands(file: str, what: str) -> list[str]:
    """Read the lines of a file of commands, without comments and empty lines."""
    return [line for line in map(str.strip, read_lines(file, what)) if line and not line.startswith("#")]


def read_lines(file: str, what: str) -> list[str]:
    """Read the lines of a text file.

    Raises:
        SettingsError: It is not a regular file, is larger than 10 MB, is not UTF-8 text, or cannot be read.
    """
    try:
        return read_regular(Path(file).expanduser(), limit=_LIMIT, error=SettingsError).decode().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise SettingsError(f"{what} {file!r} cannot be read: {reason}.") from None


_LIMIT = 10_000_000
"""Bytes of a text file; a hostfile of a hundred thousand machines has 4 MB."""
