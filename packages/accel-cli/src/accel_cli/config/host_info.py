"""Probe this host, for the suggested answers of questions."""

from __future__ import annotations

import shutil
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING

from accel_cli.launch.machine import this_machine
from accel_state.topology import first_host

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True, kw_only=True)
class HostInfo:
    """This host, and the nodes of its Slurm job.

    Args:
        address: Network address; None if the host has none.
        nodes: Number of nodes of the Slurm job; 1 outside of one.
        first_node: Name of the job's first node; None outside of one.
    """

    gpus: int = 0
    cores: int = 1
    bf16: bool = False
    address: str | None = None
    nodes: int = 1
    first_node: str | None = None


def probe_host(environ: Mapping[str, str]) -> HostInfo:
    """Probe this host, without torch."""
    machine = this_machine(environ)
    nodes = environ.get("SLURM_JOB_NUM_NODES", "")
    return HostInfo(
        gpus=machine.gpus,
        cores=machine.cores,
        # All NVIDIA GPUs have compute capability 8 (Ampere) or later; AMD's are assumed to compute in it.
        bf16=machine.gpus > 0
        and (shutil.which("nvidia-smi") is None or (machine.capability() or (0, 0)) >= (8, 0)),
        address=_address(),
        nodes=int(nodes) if nodes.isdecimal() and int(nodes) > 0 else 1,
        first_node=first_host(environ.get("SLURM_JOB_NODELIST", "")),
    )


def _address() -> str | None:
    """Return the address of the outgoing network interface; no packet is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # an address for documentation: RFC 5737
            return str(probe.getsockname()[0])
        except OSError:
            return None
