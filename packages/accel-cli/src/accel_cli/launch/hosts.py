"""This machine; hostfiles."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path

from accel_state.device_kinds import KINDS, nvidia_smi, peer_variables
from accel_state.errors import MissingDependencyError, SettingsError
from accel_state.files import read_regular
from accel_state.libraries import BACKENDS, BY_NAME, is_installed

VISIBLE_DEVICES: Mapping[str, str] = {
    kind.distributed_type.value: kind.visible_devices_env
    for kind in reversed(KINDS)  # of two families with one label, the first of the table counts
    if kind.visible_devices_env is not None and kind.runtime is None
}
"""By label of a device family, the variable that restricts which of its devices a process sees."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostDevices:
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


def probe_devices(environ: Mapping[str, str]) -> HostDevices:
    """Probe this machine."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    installed = _present()
    return HostDevices(
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


_LIMIT = 10_000_000  # bytes; a hostfile of a hundred thousand machines has 4 MB


def text_lines(file: str, what: str) -> list[str]:
    """The lines of a text file.

    Raises:
        SettingsError: It is no regular file, larger than 10 MB, no text in UTF-8, or cannot be read.
    """
    try:
        return read_regular(Path(file).expanduser(), limit=_LIMIT, error=SettingsError).decode().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise SettingsError(f"{what} {file!r} cannot be read: {reason}.") from None


def command_lines(file: str, what: str) -> list[str]:
    """The lines of a file of commands, without comments and empty lines."""
    return [line for line in map(str.strip, text_lines(file, what)) if line and not line.startswith("#")]


_MOST_SLOTS = 1 << 16  # more than any machine has; filters name slots one by one
_LINE = re.compile(r"(?P<host>[^\s:=]+)\s+slots\s*=\s*(?P<slots>\d+)\s*")


def read_hosts(file: str, inclusion: str | None = None, exclusion: str | None = None) -> dict[str, int]:
    """Read a hostfile of DeepSpeed.

    Raises:
        SettingsError: The file cannot be used, or a filter names what is not in it.
    """
    return filtered(parse_hosts(text_lines(file, "hostfile"), file), inclusion, exclusion)


def parse_hosts(lines: Sequence[str], source: str) -> dict[str, int]:
    """Read the lines of a hostfile of DeepSpeed.

    Raises:
        SettingsError: A line cannot be read, or a machine occurs twice; the message has its number.

    Example:
        >>> parse_hosts(["worker-1 slots=4", "worker-2 slots=8  # large"], "hosts")
        {'worker-1': 4, 'worker-2': 8}
    """
    found: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        match = _LINE.fullmatch(text)
        if match is None or match["host"] in found:
            expected = "that machine is there already" if match else "expected `<machine> slots=<number>`"
            raise SettingsError(
                f"line {number} of hostfile {source!r} is {line.strip()[:100]!r}: {expected}."
            )
        # Compared as text first: Python refuses to read numbers of thousands of digits.
        if len(match["slots"].lstrip("0")) > 5 or int(match["slots"]) > _MOST_SLOTS:
            raise SettingsError(
                f"line {number} of hostfile {source!r} is {line.strip()[:60]!r}: expected at most "
                f"{_MOST_SLOTS} slots."
            )
        found[match["host"]] = int(match["slots"])
    if not found:
        raise SettingsError(f"hostfile {source!r} names no machine.")
    return found


def filtered(
    hosts: Mapping[str, int], inclusion: str | None = None, exclusion: str | None = None
) -> dict[str, int]:
    """Apply DeepSpeed's filters.

    Args:
        hosts: Machines and their numbers of slots.
        inclusion: Machines that take part, `@` between, each with `:` and its slots if not all do.
        exclusion: The same for what does not take part.

    Raises:
        SettingsError: A filter names a machine or slot that is not there, or leaves none.

    Example:
        >>> hosts = {"a": 4, "b": 4}
        >>> filtered(hosts, inclusion="b:0,2"), filtered(hosts, exclusion="a@b:3")
        ({'b': 2}, {'b': 3})
    """
    slots = {host: set(range(count)) for host, count in hosts.items()}
    if inclusion:
        chosen = _named(inclusion, slots, "inclusion")
        slots = {host: chosen[host] for host in slots if host in chosen}
    if exclusion:
        dropped = _named(exclusion, slots, "exclusion")
        slots = {host: left - dropped.get(host, set()) for host, left in slots.items()}
    result = {host: len(left) for host, left in slots.items() if left}
    if not result:
        raise SettingsError("the filters leave no machine of the hostfile.")
    return result


def _named(text: str, slots: Mapping[str, set[int]], what: str) -> dict[str, set[int]]:
    found: dict[str, set[int]] = {}
    for part in text.split("@"):
        host, colon, numbers = part.strip().partition(":")
        if host not in slots:
            raise SettingsError(
                f"the {what} filter {text!r} names the machine {host!r}; the hostfile has {', '.join(slots)}."
            )
        try:
            chosen = {int(number) for number in numbers.split(",")} if colon else slots[host]
        except ValueError:
            raise SettingsError(f"the {what} filter {text!r}: {numbers!r} are no numbers of slots.") from None
        if not chosen <= slots[host]:
            raise SettingsError(
                f"the {what} filter {text!r} names slots of {host!r} that it has not: "
                f"{sorted(chosen - slots[host])}."
            )
        found[host] = found.get(host, set()) | chosen
    return found


def first_machine(file: str) -> str:
    """Return the first machine that a hostfile of MPI lists.

    Raises:
        SettingsError: The file cannot be read, or lists none.
    """
    names = [line.partition("#")[0].split() for line in text_lines(file, "hostfile")]
    found = next((words[0].partition(":")[0] for words in names if words), None)
    if found is None:
        raise SettingsError(f"hostfile {file!r} names no machine.")
    return found
