"""What Slurm says inside `srun`, as settings: nothing about machines has to be said again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel_state.settings import Given, Layer
from accel_state.topology import detect, rendezvous

if TYPE_CHECKING:
    from collections.abc import Mapping


def given_by_slurm(environ: Mapping[str, str]) -> dict[str, Given]:
    """Read the place of this machine, where `srun` has started one task on each.

    Where it has started several, each task is a process of training itself, and there is nothing to say.

    Args:
        environ: The environment, or a copy of it.

    Raises:
        SettingsError: The variables of Slurm contradict each other.

    Example:
        >>> step = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_JOB_ID": "7"}
        >>> step |= {"SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_STEP_NODELIST": "gpu[3-4]"}
        >>> {path: given.value for path, given in given_by_slurm(step).items()}["launch.machine_rank"]
        1
    """
    place = detect(environ)
    if place.launcher != "Slurm" or place.world_size == 1 or place.local_world_size != 1:
        return {}
    meeting = rendezvous(environ, place)
    values = {
        "launch.num_machines": (place.world_size, "SLURM_NTASKS"),
        "launch.machine_rank": (place.rank, "SLURM_PROCID"),
        "launch.main_process_ip": (meeting.address, "MASTER_ADDR or SLURM_STEP_NODELIST"),
        "launch.main_process_port": (meeting.port, "MASTER_PORT or SLURM_JOB_ID"),
    }
    return {
        path: Given(value=value, layer=Layer.ENVIRONMENT, origin=f"variable {name}")
        for path, (value, name) in values.items()
    }
