"""Pin a process to the cores that are near its GPU."""

from __future__ import annotations

import functools
import logging
import os
from pathlib import Path

import torch

from accel_state.devices.probes import is_cuda_available
from accel_state.environ import parse_flag_from_env

_SYSFS = Path("/sys/bus/pci/devices")

logger = logging.getLogger(__name__)


def override_numa_affinity(local_process_index: int, verbose: bool | None = None) -> None:
    """Pin this process to the cores near its GPU, also if it is pinned already.

    Does nothing but log where there is no CUDA device, or the machine does not say which cores are near it.

    Args:
        local_process_index: Local rank, which is also the index of its GPU.
        verbose: Log the cores as information rather than for debugging; by default if
            `ACCELERATE_DEBUG_MODE` is set.
    """
    if verbose is None:
        verbose = parse_flag_from_env("ACCELERATE_DEBUG_MODE", default=False)
    if not is_cuda_available() or not hasattr(os, "sched_setaffinity"):
        logger.info("Not pinned to cores: there is no CUDA device that some of them could be near to.")
        return
    address = _pci_address(local_process_index)
    cores = near_cores(address) & os.sched_getaffinity(0) if address else set[int]()
    if not cores:
        logger.warning("Not pinned to cores: this machine does not tell which ones are near to the GPU.")
        return
    os.sched_setaffinity(0, cores)
    level = logging.INFO if verbose else logging.DEBUG
    logger.log(
        level, "Process %d of this machine is pinned to the cores %s.", local_process_index, sorted(cores)
    )


@functools.cache
def set_numa_affinity(local_process_index: int, verbose: bool | None = None) -> None:
    """Pin this process to the cores near its GPU, once: later calls leave it as it is."""
    override_numa_affinity(local_process_index, verbose)


def near_cores(address: str, devices: Path = _SYSFS) -> set[int]:
    """Return the cores near a device, by its PCI address (`"0000:3b:00.0"`); none if the kernel has none."""
    listing = devices / address / "local_cpulist"
    return parse_cores(listing.read_text()) if listing.is_file() else set()


def parse_cores(text: str) -> set[int]:
    """Read a list of cores as the kernel writes it.

    Example:
        >>> sorted(parse_cores("0-3,8"))
        [0, 1, 2, 3, 8]
    """
    cores: set[int] = set()
    for span in filter(None, text.strip().split(",")):
        first, _, last = span.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return cores


def _pci_address(index: int) -> str | None:
    properties = torch.cuda.get_device_properties(index % torch.cuda.device_count())
    if not hasattr(properties, "pci_bus_id"):  # older torch does not tell
        return None
    return f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
