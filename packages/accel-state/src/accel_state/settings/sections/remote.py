"""MPI, TPU pods and Amazon SageMaker. Only the command reads these."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from accel_state.settings.option import Answers, documented, rows_of, setting
from accel_state.settings.parsing import json_object, optional

if TYPE_CHECKING:
    from collections.abc import Mapping


def _mpi(answers: Answers) -> bool:
    return answers("launch.distributed_type") == "MULTI_CPU" and answers("launch.num_machines") > 1


def _tpu(answers: Answers) -> bool:
    return answers("launch.distributed_type") == "XLA"


def _pod(answers: Answers) -> bool:
    return _tpu(answers) and bool(answers("tpu.use_cluster"))


def _cloud(answers: Answers) -> bool:
    return answers("launch.compute_environment") == "AMAZON_SAGEMAKER"


def _usual_container(answers: Answers) -> bool:
    return _cloud(answers) and not answers("sagemaker.image_uri")


def _sagemaker(help: str, **more: Any) -> Any:  # noqa: A002 - as the field is called
    ask_if = _cloud if "question" in more else None
    return setting(lambda field: {"key": field, "ask_if": ask_if}, help=help, **more)


def _of_pod(help: str, **more: Any) -> Any:  # noqa: A002 - as the field is called
    return setting(lambda field: {"key": f"tpu_{field}", "ask_if": _pod}, help=help, **more)


@documented
@dataclass(frozen=True, slots=True, kw_only=True)
class MpiSettings:
    """Starting processes with `mpirun`."""

    hostfile: str | None = setting(
        help="Start processes with mpirun on the machines that this file lists.",
        flags=("--mpirun_hostfile",),
        key="mpirun_config.mpirun_hostfile",
        question="The path of a file that lists the machines, to start with mpirun? (empty: without)",
        ask_if=_mpi,
    )


MPI = rows_of("mpi", MpiSettings, topic="MPI")


@documented
@dataclass(frozen=True, slots=True, kw_only=True)
class TpuSettings:
    """Training on TPUs, on this machine or on the machines of a pod."""

    main_training_function: str = setting(
        help="The function of the script that each process runs on a TPU.",
        default="main",
        flags=("--main_training_function",),
        key="main_training_function",
        question="Which function of the script does each process run?",
        ask_if=_tpu,
    )
    downcast_bf16: bool = setting(
        help="With bf16 on a TPU: let double mean float32. Otherwise it means bfloat16, as float does.",
        default=False,
        flags=("--downcast_bf16",),
        key="downcast_bf16",
        question="Let double mean float32? Otherwise it means bfloat16, as float does.",
        ask_if=lambda answers: _tpu(answers) and answers("precision.mixed_precision") == "bf16",
    )
    use_cluster: bool = _of_pod(
        "Run on all machines of a pod.",
        default=False,
        flags=("--tpu_cluster",),
        flag_aliases=(("--no_tpu_cluster", "false"),),
        question="Run on all machines of a pod?",
        ask_if=_tpu,
    )
    name: str | None = _of_pod("The name of the TPU.", question="What is the TPU called?")
    zone: str | None = _of_pod("The zone of the TPU.", question="In which zone is it?")
    use_sudo: bool = _of_pod(
        "Run as root on the machines of a pod.",
        default=False,
        flags=("--tpu_use_sudo",),
        question="Run as root there?",
    )
    vm: tuple[str, ...] = _of_pod(
        "Names of single machines; may be repeated.",
        default=(),
        flags=("--vm",),
        kind="list",
        question="Names of single machines, with commas between? (empty: all of the pod)",
    )
    env: tuple[str, ...] = _of_pod(
        "A variable for the machines of a pod, as NAME=value; may be repeated.",
        default=(),
        flags=("--env",),
        kind="list",
        question="Variables for them, as NAME=value with commas between? (empty: none)",
    )
    command_file: str | None = _of_pod(
        "A file with commands that the machines of a pod run first.",
        key="command_file",
        question="A file with commands that they run first? (empty: none)",
    )
    commands: tuple[str, ...] = _of_pod(
        "Commands that the machines of a pod run first.",
        default=(),
        kind="list",
        key="commands",
        question="Commands that they run first, with commas between? (empty: none)",
        ask_if=lambda answers: _pod(answers) and not answers("tpu.command_file"),
    )


TPU = rows_of("tpu", TpuSettings, topic="TPU")


@documented
@dataclass(frozen=True, slots=True, kw_only=True)
class SageMakerSettings:
    """Training as a job of Amazon SageMaker."""

    ec2_instance_type: str | None = _sagemaker(
        "What machines the job runs on.",
        question="On which instance type?",
    )
    iam_role_name: str | None = _sagemaker("The role that the job has.", question="With which IAM role?")
    profile: str | None = _sagemaker(
        "The profile of the AWS configuration.",
        question="With which AWS profile? (empty: the variables of AWS, or the flags)",
    )
    region: str = _sagemaker("The region of AWS.", default="us-east-1", question="In which region?")
    image_uri: str | None = _sagemaker(
        "A container of your own.",
        question="In a container of your own? (empty: the usual one)",
    )
    pytorch_version: str = _sagemaker(
        "The version of PyTorch in the usual container.",
        default="1.10.2",
        question="Which version of PyTorch?",
        ask_if=_usual_container,
    )
    transformers_version: str = _sagemaker(
        "The version of transformers in the usual container.",
        default="4.17.0",
        question="Which version of transformers?",
        ask_if=_usual_container,
    )
    py_version: str = _sagemaker(
        "The version of Python in the usual container, as py310.",
        default="py38",
        question="Which version of Python, as py310?",
        ask_if=_usual_container,
    )
    base_job_name: str = _sagemaker(
        "What jobs are called.",
        default="accelerate-sagemaker-1",
        question="What are jobs called?",
    )
    sagemaker_inputs_file: str | None = _sagemaker(
        "A file of channel names and data locations, with tabs between.",
        question="A file of channel names and data locations, with tabs between? (empty: none)",
    )
    sagemaker_metrics_file: str | None = _sagemaker(
        "A file of metric names and regular expressions, with tabs between.",
        question="A file of metric names and regular expressions, with tabs between? (empty: none)",
    )
    additional_args: Mapping[str, Any] | None = _sagemaker(
        "More arguments of the SageMaker estimator.",
        parse=optional(json_object, "{}"),
        kind="table",
        skip_reason="It is a table; write it into the file.",
    )
    aws_access_key_id: str | None = setting(
        help="An access key, in place of a profile.",
        flags=("--aws_access_key_id",),
        skip_reason="It is a secret, which belongs into no file.",
        repr=False,
    )
    aws_secret_access_key: str | None = setting(
        help="The secret of that key.",
        flags=("--aws_secret_access_key",),
        skip_reason="It is a secret, which belongs into no file.",
        repr=False,
    )


SAGEMAKER = rows_of("sagemaker", SageMakerSettings, topic="Amazon SageMaker")
