"""Settings of jobs on other hosts: MPI, hostfiles, TPU pods, SageMaker. Only the command reads them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True, kw_only=True)
class MpiSettings:
    """Starting processes with `mpirun`.

    Args:
        hostfile: The file that lists the hosts.
    """

    hostfile: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSettings:
    """Starting processes on the machines of a DeepSpeed hostfile.

    Args:
        hostfile: The file that lists the machines, as `"worker-1 slots=8"`.
        launcher: The program that starts workers on them: `"pdsh"`, `"standard"`, `"openmpi"`, `"mvapich"`,
            `"mpich"`, `"slurm"` or `"nossh"`.
        inclusion: The hosts and slots to use, as `"worker-1@worker-2:0,2"`.
        exclusion: The hosts and slots to leave out, as `"worker-1:0"`.
    """

    hostfile: str | None = None
    launcher: str | None = None
    inclusion: str | None = None
    exclusion: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TpuSettings:
    """Training on TPUs, on this machine or on the machines of a pod.

    Args:
        name: The name of the TPU.
        zone: Its zone.
        use_cluster: Whether the command is for all machines of a pod.
        use_sudo: Whether they run it as root.
        vm: The names of single machines.
        env: Variables for them, as `"NAME=value"`.
        command_file: A file with commands to run before.
        commands: Commands to run before.
        downcast_bf16: Whether both float and double mean bfloat16.
        main_training_function: The function of the script that each process runs.
    """

    name: str | None = None
    zone: str | None = None
    use_cluster: bool = False
    use_sudo: bool = False
    vm: tuple[str, ...] = ()
    env: tuple[str, ...] = ()
    command_file: str | None = None
    commands: tuple[str, ...] = ()
    downcast_bf16: bool = False
    main_training_function: str = "main"


@dataclass(frozen=True, slots=True, kw_only=True)
class SageMakerSettings:
    """Training as a job of Amazon SageMaker.

    Args:
        ec2_instance_type: The instance type.
        iam_role_name: The IAM role of the job.
        image_uri: The container, if not the usual one.
        profile: The profile of the AWS configuration.
        region: The AWS region.
        base_job_name: The prefix of job names.
        pytorch_version: PyTorch version of the default container.
        transformers_version: Transformers version of the default container.
        py_version: Python version of the default container.
        sagemaker_inputs_file: A file of tab-separated input channels and data locations.
        sagemaker_metrics_file: A file of tab-separated metric names and regular expressions.
        additional_args: More arguments of the estimator.
        aws_access_key_id: Access key, instead of a profile.
        aws_secret_access_key: Secret key, instead of a profile.
    """

    ec2_instance_type: str | None = None
    iam_role_name: str | None = None
    image_uri: str | None = None
    profile: str | None = None
    region: str = "us-east-1"
    base_job_name: str = "accelerate-sagemaker-1"
    pytorch_version: str = "1.10.2"
    transformers_version: str = "4.17.0"
    py_version: str = "py38"
    sagemaker_inputs_file: str | None = None
    sagemaker_metrics_file: str | None = None
    additional_args: Mapping[str, Any] | None = None
    aws_access_key_id: str | None = field(default=None, repr=False)
    aws_secret_access_key: str | None = field(default=None, repr=False)
