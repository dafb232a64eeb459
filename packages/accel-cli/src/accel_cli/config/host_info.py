"""What is found out about this machine, for the defaults of questions."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING

from accel_cli.launch.machine import ask_nvidia, this_machine
from accel_state.topology import first_host

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True, kw_only=True)
class HostInfo:
    """This machine, and its neighbours as far as they are known.

    Args:
        gpus: How many GPUs it has.
        cores: How many CPU cores may be used.
        bf16: Whether its GPUs compute in bfloat16.
        address: Its address in the network; None if it has none.
        machines: How many machines the Slurm job has; 1 outside of one.
        first_machine: The first of them, if there is a job.
    """

    gpus: int = 0
    cores: int = 1
    bf16: bool = False
    address: str | None = None
    machines: int = 1
    first_machine: str | None = None


def probe_host(environ: Mapping[str, str]) -> HostInfo:
    """Look at this machine, without torch.

    Args:
        environ: The environment.
    """
    machine = this_machine(environ)
    nodes = environ.get("SLURM_JOB_NUM_NODES", "")
    return HostInfo(
        gpus=machine.gpus,
        cores=machine.cores,
        bf16=machine.gpus > 0 and _computes_bf16(),
        address=_address(),
        machines=int(nodes) if nodes.isdecimal() and int(nodes) > 0 else 1,
        first_machine=first_host(environ.get("SLURM_JOB_NODELIST", "")),
    )


def _computes_bf16() -> bool:
    """Whether every GPU of NVIDIA is of generation 8 (Ampere) or later; those of AMD are taken to be able."""
    output = ask_nvidia("--query-gpu=compute_cap", "--format=csv,noheader")
    if output is None:
        return True
    words = output.split()
    return bool(words) and all(line.partition(".")[0].isdecimal() and float(line) >= 8 for line in words)


def _address() -> str | None:
    """The address from which the rest of the network would be reached; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # an address for documentation: RFC 5737
            return str(probe.getsockname()[0])
        except OSError:
            return None
