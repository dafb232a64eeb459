"""Settings from the variables of Slurm inside `srun`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel_state.settings import Layer, SourcedValue
from accel_state.topology import detect, rendezvous

if TYPE_CHECKING:
    from collections.abc import Mapping


def parse_slurm(environ: Mapping[str, str]) -> dict[str, SourcedValue]:
    """Read node rank, number of nodes and rendezvous, where `srun` has started one task on each node.

    Where it has started several, each task is a process of training itself, and there is nothing to say.

    Example:
        >>> step = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_JOB_ID": "7"}
        >>> step |= {"SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_STEP_NODELIST": "gpu[3-4]"}
        >>> {path: given.value for path, given in parse_slurm(step).items()}["launch.machine_rank"]
        1
    """
    topology = detect(environ)
    if topology.launcher != "Slurm" or topology.world_size == 1 or topology.local_world_size != 1:
        return {}
    master = rendezvous(environ, topology)
    values = {
        "launch.num_machines": (topology.world_size, "SLURM_NTASKS"),
        "launch.machine_rank": (topology.rank, "SLURM_PROCID"),
        "launch.main_process_ip": (master.address, "MASTER_ADDR or SLURM_STEP_NODELIST"),
        "launch.main_process_port": (master.port, "MASTER_PORT or SLURM_JOB_ID"),
    }
    return {
        path: SourcedValue(value=value, layer=Layer.ENVIRONMENT, origin=f"variable {name}")
        for path, (value, name) in values.items()
    }
