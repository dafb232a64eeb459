"""The ways to run a plan, by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel_cli.launch import run_deepspeed, run_mpi, run_pod, run_sagemaker, run_simple, run_torchrun, run_xla

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from accel_cli.launch.job import Job
    from accel_cli.launch.plan import LaunchPlan

RUNNERS: Mapping[str, Callable[[LaunchPlan], Job]] = {
    "simple": run_simple.job,
    "torchrun": run_torchrun.job,
    "mpirun": run_mpi.job,
    "deepspeed": run_deepspeed.job,
    "xla": run_xla.job,
    "pod": run_pod.job,
    "sagemaker": run_sagemaker.job,
}
"""Each makes the program to become, after a last look: is the port free, is the script there."""
