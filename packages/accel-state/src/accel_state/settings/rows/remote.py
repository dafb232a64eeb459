"""MPI, TPU pods and Amazon SageMaker. Only the command reads these."""

from __future__ import annotations

from typing import Any

from accel_state.settings.option import Answers, Option
from accel_state.settings.parsing import boolean, json_object, optional

_SAGEMAKER = "Amazon SageMaker"


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


def _sagemaker(field: str, help: str, **more: Any) -> Option:  # noqa: A002 - as the field is called
    rest: dict[str, Any] = {"ask_if": _cloud if "question" in more else None, **more}
    return Option(
        path=f"sagemaker.{field}",
        help=help,
        topic=_SAGEMAKER,
        key=field,
        **rest,
    )


MPI = (
    Option(
        path="mpi.hostfile",
        help="Start processes with mpirun on the machines that this file lists.",
        topic="MPI",
        flags=("--mpirun_hostfile",),
        key="mpirun_config.mpirun_hostfile",
        question="The path of a file that lists the machines, to start with mpirun? (empty: without)",
        ask_if=_mpi,
    ),
)
"""Rows of `MpiSettings`."""

TPU = (
    Option(
        path="tpu.main_training_function",
        help="The function of the script that each process runs on a TPU.",
        topic="TPU",
        flags=("--main_training_function",),
        key="main_training_function",
        question="Which function of the script does each process run?",
        ask_if=_tpu,
    ),
    Option(
        path="tpu.downcast_bf16",
        help="Let both float and double mean bfloat16.",
        topic="TPU",
        parse=boolean,
        flags=("--downcast_bf16",),
        const="true",
        key="downcast_bf16",
        question="Let both float and double mean bfloat16?",
        ask_if=lambda answers: _tpu(answers) and answers("precision.mixed_precision") == "bf16",
    ),
    Option(
        path="tpu.use_cluster",
        help="Run on all machines of a pod.",
        topic="TPU",
        parse=boolean,
        flags=("--tpu_cluster",),
        const="true",
        flag_aliases=(("--no_tpu_cluster", "false"),),
        key="tpu_use_cluster",
        question="Run on all machines of a pod?",
        ask_if=_tpu,
    ),
    Option(
        path="tpu.name",
        help="The name of the TPU.",
        topic="TPU",
        key="tpu_name",
        question="What is the TPU called?",
        ask_if=_pod,
    ),
    Option(
        path="tpu.zone",
        help="The zone of the TPU.",
        topic="TPU",
        key="tpu_zone",
        question="In which zone is it?",
        ask_if=_pod,
    ),
    Option(
        path="tpu.use_sudo",
        help="Run as root on the machines of a pod.",
        topic="TPU",
        parse=boolean,
        flags=("--tpu_use_sudo",),
        const="true",
        key="tpu_use_sudo",
        question="Run as root there?",
        ask_if=_pod,
    ),
    Option(
        path="tpu.vm",
        help="Names of single machines; may be repeated.",
        topic="TPU",
        flags=("--vm",),
        kind="list",
        key="tpu_vm",
        question="Names of single machines, with commas between? (empty: all of the pod)",
        ask_if=_pod,
    ),
    Option(
        path="tpu.env",
        help="A variable for the machines of a pod, as NAME=value; may be repeated.",
        topic="TPU",
        flags=("--env",),
        kind="list",
        key="tpu_env",
        question="Variables for them, as NAME=value with commas between? (empty: none)",
        ask_if=_pod,
    ),
    Option(
        path="tpu.command_file",
        help="A file with commands that the machines of a pod run first.",
        topic="TPU",
        key="command_file",
        question="A file with commands that they run first? (empty: none)",
        ask_if=_pod,
    ),
    Option(
        path="tpu.commands",
        help="Commands that the machines of a pod run first.",
        topic="TPU",
        kind="list",
        key="commands",
        question="Commands that they run first, with commas between? (empty: none)",
        ask_if=lambda answers: _pod(answers) and not answers("tpu.command_file"),
    ),
)
"""Rows of `TpuSettings`."""

SAGEMAKER = (
    _sagemaker(
        "ec2_instance_type",
        "What machines the job runs on.",
        question="On which instance type?",
    ),
    _sagemaker(
        "iam_role_name",
        "The role that the job has.",
        question="With which IAM role?",
    ),
    _sagemaker(
        "profile",
        "The profile of the AWS configuration.",
        question="With which AWS profile? (empty: the variables of AWS, or the flags)",
    ),
    _sagemaker(
        "region",
        "The region of AWS.",
        question="In which region?",
    ),
    _sagemaker(
        "image_uri",
        "A container of your own.",
        question="In a container of your own? (empty: the usual one)",
    ),
    _sagemaker(
        "pytorch_version",
        "The version of PyTorch in the usual container.",
        question="Which version of PyTorch?",
        ask_if=_usual_container,
    ),
    _sagemaker(
        "transformers_version",
        "The version of transformers in the usual container.",
        question="Which version of transformers?",
        ask_if=_usual_container,
    ),
    _sagemaker(
        "py_version",
        "The version of Python in the usual container, as py310.",
        question="Which version of Python, as py310?",
        ask_if=_usual_container,
    ),
    _sagemaker(
        "base_job_name",
        "What jobs are called.",
        question="What are jobs called?",
    ),
    _sagemaker(
        "sagemaker_inputs_file",
        "A file of channel names and data locations, with tabs between.",
        question="A file of channel names and data locations, with tabs between? (empty: none)",
    ),
    _sagemaker(
        "sagemaker_metrics_file",
        "A file of metric names and regular expressions, with tabs between.",
        question="A file of metric names and regular expressions, with tabs between? (empty: none)",
    ),
    _sagemaker(
        "additional_args",
        "More arguments of the SageMaker estimator.",
        parse=optional(json_object, "{}"),
        kind="table",
        skip_reason="It is a table; write it into the file.",
    ),
    Option(
        path="sagemaker.aws_access_key_id",
        help="An access key, in place of a profile.",
        topic=_SAGEMAKER,
        flags=("--aws_access_key_id",),
        skip_reason="It is a secret, which belongs into no file.",
    ),
    Option(
        path="sagemaker.aws_secret_access_key",
        help="The secret of that key.",
        topic=_SAGEMAKER,
        flags=("--aws_secret_access_key",),
        skip_reason="It is a secret, which belongs into no file.",
    ),
)
"""Rows of `SageMakerSettings`."""
