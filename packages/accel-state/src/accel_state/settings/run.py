"""Settings of a run: launch, process, remote machines and training."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from accel_state.device_kinds import KINDS
from accel_state.frozen import frozen
from accel_state.labels import DistributedType, DynamoBackend, PrecisionType
from accel_state.settings.option import (
    Answers,
    documented,
    integer,
    json_object,
    number,
    one_of,
    optional,
    plain,
    rows_of,
    setting,
    spelled,
)

_OF_DEVICES = {kind.distributed_type for kind in KINDS if kind.runtime is None}
DEVICE_TYPES = tuple(label.value for label in DistributedType if label in _OF_DEVICES)
"""The values of `distributed_type` that only name the hardware."""

ENGINE_TYPES = {"FSDP": "fsdp", "DEEPSPEED": "deepspeed", "MEGATRON_LM": "megatron"}
"""The values of `distributed_type` that switch on an engine, with its section of `Settings`."""

SAGEMAKER_TYPES = ("DATA_PARALLEL", "MODEL_PARALLEL")
DISTRIBUTED_TYPES = (*DEVICE_TYPES, *ENGINE_TYPES, "XLA", *SAGEMAKER_TYPES)
"""All values of `distributed_type`."""

_ENVIRONMENTS = ("LOCAL_MACHINE", "AMAZON_SAGEMAKER")


def is_local(answers: Answers) -> bool:
    """Return whether the answers so far describe the user's own machines."""
    return answers("launch.compute_environment") != "AMAZON_SAGEMAKER"


def several_machines(answers: Answers) -> bool:
    """Return whether the answers so far describe several machines of the user."""
    return is_local(answers) and answers("launch.num_machines") > 1


def _row(help: str, **more: Any) -> Any:  # noqa: A002 - as the field is called
    return setting(lambda field: {"flags": (f"--{field}",), "key": field}, help=help, **more)


@documented
@frozen
class LaunchSettings:
    """How the command starts processes. Workers get their ranks from their launcher instead."""

    compute_environment: str = _row(
        "Where the script runs.",
        default="LOCAL_MACHINE",
        choices=_ENVIRONMENTS,
        question="Where will you train?",
        flags=(),
    )
    distributed_type: str | None = _row(
        "Hardware to train on. --multi_gpu starts one process per GPU and fails without GPUs; --tpu starts"
        " one per chip.",
        parse=lambda text: one_of(*DISTRIBUTED_TYPES)("XLA" if text.upper() == "TPU" else text),
        choices=DISTRIBUTED_TYPES,
        flags=("--multi_gpu",),
        const="MULTI_GPU",
        flag_aliases=(("--tpu", "XLA"),),
        question="Which hardware will you train on?",
    )
    launcher: str | None = _row("Launcher, by name; auto chooses the first that applies.")
    num_machines: int = _row(
        "Number of nodes (machines).",
        default=1,
        flags=("--num_machines", "--nodes"),
        ask_if=lambda answers: (
            not is_local(answers) or answers("launch.distributed_type") not in {"NO", "XLA"}
        ),
    )
    num_processes: int | None = _row(
        "World size: number of processes on all nodes (default: one per device).",
        parse=optional(integer(1), "-1"),
        ask_if=lambda answers: is_local(answers) and answers("launch.distributed_type") != "NO",
    )
    min_machines: int | None = _row(
        "Continue with at least this many nodes when others leave; needs a rendezvous that is not static."
    )
    machine_rank: int = _row(
        "Rank of this node, counted from 0.", default=0, parse=integer(0), ask_if=several_machines
    )
    main_process_ip: str | None = _row(
        "IP address or host name of node 0, which runs rank 0.", ask_if=several_machines
    )
    main_process_port: int | None = _row(
        "TCP port of the rendezvous on node 0; 0 picks a free one, with a single node.",
        parse=integer(0, 65535),
        ask_if=several_machines,
    )
    rdzv_backend: str = _row(
        "Rendezvous backend: static, or one of torch.distributed.run.",
        default="static",
        question="Which rendezvous backend do you want? (static: fixed node ranks; c10d: any order)",
        ask_if=several_machines,
    )
    rdzv_conf: str | None = _row("Extra rendezvous options, as key=value,key=value.")
    same_network: bool = _row(
        "Whether the nodes share a network. Kept for Accelerate's config files; has no effect.", default=False
    )
    gpu_ids: str | None = _row(
        "Devices of this machine to use, such as 0,1 (default: all).",
        question="Which devices of this machine will you use, such as 0,1? (all for every device)",
        ask_if=lambda answers: (
            is_local(answers)
            and answers("launch.num_machines") == 1
            and answers("launch.distributed_type") not in {"NO", "MULTI_CPU", "XLA"}
        ),
    )
    num_cpu_threads_per_process: int | None = _row(
        "Threads per process (OMP_NUM_THREADS); by default, the processes share the cores."
    )
    max_restarts: int = _row(
        "How many times to restart a failed group of workers.", default=0, parse=integer(0)
    )
    monitor_interval: float = _row(
        "Seconds between checks of the workers.", default=0.1, parse=number(0, of="seconds")
    )
    shutdown_timeout: int | None = _row(
        "Seconds between a signal and killing the processes; torch's default is 30."
    )
    tee: str = _row(
        "Streams to write to both console and file, as in torch.distributed.run --tee.",
        default="0",
        flags=("-t", "--tee"),
    )
    log_dir: str | None = _row("Folder for the workers' log files.")
    role: str = _row("Role of the workers, shown in logs.", default="default")
    module: bool = _row(
        "Run the script as a module, like python -m.", default=False, flags=("-m", "--module"), key=None
    )
    no_python: bool = _row("The script is an executable; run it without Python.", default=False, key=None)
    quiet: bool = _row(
        "Suppress the launcher's summary when a worker fails.",
        default=False,
        flags=("-q", "--quiet"),
        key=None,
    )

    @property
    def on_tpu(self) -> bool:
        """Whether processes run on TPUs, which have separate launchers."""
        return self.distributed_type == "XLA"

    @property
    def device_ids(self) -> tuple[str, ...]:
        """The selected devices of this machine; empty for all.

        Example:
            >>> LaunchSettings(gpu_ids="0, 2").device_ids, LaunchSettings(gpu_ids="all").device_ids
            (('0', '2'), ())
        """
        text = self.gpu_ids or "all"
        return () if text.strip().lower() == "all" else tuple(item.strip() for item in text.split(","))


LAUNCH = rows_of("launch", LaunchSettings, topic="processes and machines")


@documented
@frozen
class ProcessSettings:
    """How one process runs."""

    use_cpu: bool = setting(
        help="Train on the CPU even if there is an accelerator.",
        default=False,
        variable="ACCELERATE_USE_CPU",
        flags=("--cpu",),
        key="use_cpu",
        ask_if=lambda answers: is_local(answers) and answers("launch.distributed_type") == "NO",
    )
    debug: bool = setting(
        help="Compare the calls of all ranks also in wait_for_everyone; other collectives always do.",
        default=False,
        variable="ACCELERATE_DEBUG_MODE",
        flags=("--debug",),
        key="debug",
        question="Compare the calls of all ranks also in wait_for_everyone? (for debugging)",
        ask_if=lambda answers: is_local(answers) and answers("launch.distributed_type") != "NO",
    )
    torch_device: str | None = setting(
        help="Device to use, such as cuda:1, instead of the local rank's.", variable="ACCELERATE_TORCH_DEVICE"
    )
    cpu_affinity: bool = setting(
        help="Pin each process to the CPU cores near its device (NVIDIA only).",
        default=False,
        variable="ACCELERATE_CPU_AFFINITY",
        flags=("--enable_cpu_affinity",),
        key="enable_cpu_affinity",
        ask_if=lambda answers: is_local(answers) and answers("launch.distributed_type") == "MULTI_GPU",
    )
    log_level: str | None = setting(help="Level of loggers that set none.", variable="ACCELERATE_LOG_LEVEL")
    name_stragglers: bool = setting(
        help="Name ranks that the others wait for, in the log of rank 0, once per 100 steps.",
        default=True,
        variable="ACCELERATE_NAME_STRAGGLERS",
    )
    enable_rich: bool = setting(
        help="Show tracebacks with rich.", default=False, variable="ACCELERATE_ENABLE_RICH"
    )
    as_accelerate: bool = plain(
        "Make `import accelerate` resolve to accel, in libraries as well; needs accel-compat.", default=False
    )


PROCESS = rows_of("process", ProcessSettings, topic="each process")


def _tpu(answers: Answers) -> bool:
    return answers("launch.distributed_type") == "XLA"


def _pod(answers: Answers) -> bool:
    return _tpu(answers) and bool(answers("tpu.use_cluster"))


def _cloud(answers: Answers) -> bool:
    return answers("launch.compute_environment") == "AMAZON_SAGEMAKER"


def _usual_container(answers: Answers) -> bool:
    return _cloud(answers) and not answers("sagemaker.image_uri")


def _sagemaker(help: str, **more: Any) -> Any:  # noqa: A002 - as the field is called
    return setting(lambda field: {"key": field, "ask_if": _cloud}, help=help, **more)


def _of_pod(help: str, **more: Any) -> Any:  # noqa: A002 - as the field is called
    return setting(lambda field: {"key": f"tpu_{field}", "ask_if": _pod}, help=help, **more)


@documented
@frozen
class MpiSettings:
    """Starting processes with `mpirun`."""

    hostfile: str | None = setting(
        help="Start processes with mpirun on the nodes of this hostfile.",
        flags=("--mpirun_hostfile",),
        key="mpirun_config.mpirun_hostfile",
        question="Path of a hostfile to launch with mpirun? (empty: no mpirun)",
        ask_if=lambda answers: (
            answers("launch.distributed_type") == "MULTI_CPU" and answers("launch.num_machines") > 1
        ),
    )


MPI = rows_of("mpi", MpiSettings, topic="MPI")


def _slurm_time(text: str) -> str:
    if not re.fullmatch(r"(\d+-\d+(:\d+){0,2}|\d+(:\d+){0,2}|UNLIMITED|infinite)", text):
        raise ValueError("expected minutes, hours:minutes:seconds or days-hours:minutes:seconds")
    return text


def _of_cluster(help: str, **more: Any) -> Any:  # noqa: A002 - as the field is called
    return setting(lambda field: {"flags": (f"--{field}",), "key": f"cluster.{field}"}, help=help, **more)


@documented
@frozen
class ClusterSettings:
    """A job that the scheduler of a cluster starts, with --launcher slurm, ray or kubeflow."""

    gpus_per_node: int | None = _of_cluster("GPUs per node, one for each process; by default none.")
    time: str | None = _of_cluster(
        "Slurm: time limit of the job, such as 90 (minutes), 1:30:00 or 2-00:00:00.", parse=_slurm_time
    )
    sbatch_args: tuple[str, ...] = _of_cluster(
        "Slurm: more sbatch options, such as '--partition=a --account=b'; repeatable.",
        default=(),
        kind="list",
    )
    ray_address: str = _of_cluster(
        "Ray: the cluster, as HOST:PORT or ray://HOST:PORT; auto uses RAY_ADDRESS or the cluster of "
        "this machine, local starts one.",
        default="auto",
    )
    ray_strategy: str = _of_cluster(
        "Ray: how the nodes' bundles are placed: PACK on few nodes, SPREAD on many, STRICT_PACK on one,"
        " STRICT_SPREAD each on its own.",
        default="PACK",
        choices=("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"),
    )
    image: str | None = _of_cluster("Kubernetes: the container's image, which has accel and the script.")
    namespace: str | None = _of_cluster(
        "Kubernetes: the namespace of the job; by default that of the context."
    )
    queue: str | None = _of_cluster("Kubernetes: the local queue of Kueue that admits the job.")
    format: str = _of_cluster(
        "Kubernetes: the kind of job, a trainjob (Kubeflow Trainer) or a jobset.",
        default="trainjob",
        choices=("trainjob", "jobset"),
    )


CLUSTER = rows_of("cluster", ClusterSettings, topic="jobs of a cluster")


def _of_replicas(help: str, variable: str, flag: str | None = None, **more: Any) -> Any:  # noqa: A002 - as the field is called
    named: dict[str, Any] = {"flags": (f"--{flag}",), "key": flag} if flag else {}
    return setting(help=help, variable=variable, **named, **more)


@documented
@frozen
class ReplicaSettings:
    """Groups of processes that train copies of the model by torchft, so that a group may die."""

    groups: int = _of_replicas(
        "Number of replica groups, each with a copy of the model: a group that fails is started again,"
        " and the others continue.",
        variable="NUM_REPLICA_GROUPS",
        flag="replica_groups",
        default=1,
    )
    group: int = _of_replicas(
        "Index of the replica group of this process, counted from 0.",
        variable="REPLICA_GROUP_ID",
        default=0,
        parse=integer(0),
    )
    min_groups: int = _of_replicas(
        "Fewest replica groups that continue without the others.",
        variable="ACCELERATE_MIN_REPLICA_GROUPS",
        flag="min_replica_groups",
        default=1,
    )
    timeout: int = _of_replicas(
        "Seconds after which a replica group that is silent counts as lost.",
        variable="ACCELERATE_REPLICA_TIMEOUT",
        flag="replica_timeout",
        default=5,
    )
    lighthouse: str | None = _of_replicas(
        "Address of torchft's lighthouse, http://HOST:PORT; by default, the launcher starts one.",
        variable="TORCHFT_LIGHTHOUSE",
        flag="lighthouse",
    )
    restarts: int = _of_replicas(
        "How often the replica group of this process was started again.",
        variable="ACCELERATE_REPLICA_RESTARTS",
        default=0,
        parse=integer(0),
    )


REPLICAS = rows_of("replicas", ReplicaSettings, topic="replica groups")


@documented
@frozen
class TpuSettings:
    """Training on TPUs, on this machine or on the machines of a pod."""

    main_training_function: str = setting(
        help="Function of the script that each TPU process runs.",
        default="main",
        flags=("--main_training_function",),
        key="main_training_function",
        ask_if=_tpu,
    )
    downcast_bf16: bool = setting(
        help="With bf16 on a TPU: make double mean float32 instead of bfloat16.",
        default=False,
        flags=("--downcast_bf16",),
        key="downcast_bf16",
        ask_if=lambda answers: _tpu(answers) and answers("precision.mixed_precision") == "bf16",
    )
    use_cluster: bool = _of_pod(
        "Run on all machines of a TPU pod.",
        default=False,
        flags=("--tpu_cluster",),
        flag_aliases=(("--no_tpu_cluster", "false"),),
        ask_if=_tpu,
    )
    name: str | None = _of_pod("TPU name.")
    zone: str | None = _of_pod("TPU zone.")
    use_sudo: bool = _of_pod("Use sudo on the machines of the pod.", default=False, flags=("--tpu_use_sudo",))
    vm: tuple[str, ...] = _of_pod(
        "Name of a single machine; repeatable.",
        default=(),
        flags=("--vm",),
        kind="list",
        question="Which machines, separated by commas? (empty: the whole pod)",
    )
    env: tuple[str, ...] = _of_pod(
        "Environment variable for the machines of the pod, NAME=value; repeatable.",
        default=(),
        flags=("--env",),
        kind="list",
        question="Environment variables of the pod, as NAME=value, separated by commas? (empty: none)",
    )
    command_file: str | None = _of_pod(
        "File of commands that the machines of the pod run first.",
        key="command_file",
        question="Path of a file with startup commands? (empty: none)",
    )
    commands: tuple[str, ...] = _of_pod(
        "Commands that the machines of the pod run first.",
        default=(),
        kind="list",
        key="commands",
        question="Startup commands, separated by commas? (empty: none)",
        ask_if=lambda answers: _pod(answers) and not answers("tpu.command_file"),
    )


TPU = rows_of("tpu", TpuSettings, topic="TPU")


@documented
@frozen
class SageMakerSettings:
    """Training as a job of Amazon SageMaker."""

    ec2_instance_type: str | None = _sagemaker("EC2 instance type.")
    iam_role_name: str | None = _sagemaker("IAM role.")
    profile: str | None = _sagemaker(
        "AWS profile.", question="Which AWS profile will you use? (empty: AWS variables or flags)"
    )
    region: str = _sagemaker("AWS region.", default="us-east-1")
    image_uri: str | None = _sagemaker(
        "Custom container image.", question="URI of a custom container image? (empty: the default image)"
    )
    pytorch_version: str = _sagemaker(
        "PyTorch version of the default image.", default="1.10.2", ask_if=_usual_container
    )
    transformers_version: str = _sagemaker(
        "transformers version of the default image.", default="4.17.0", ask_if=_usual_container
    )
    py_version: str = _sagemaker(
        "Python version of the default image, such as py310.", default="py38", ask_if=_usual_container
    )
    base_job_name: str = _sagemaker("Base name of jobs.", default="accelerate-sagemaker-1")
    sagemaker_inputs_file: str | None = _sagemaker(
        "Tab-separated file of channel names and data locations.",
        question="Path of a tab-separated file of channel names and data locations? (empty: none)",
    )
    sagemaker_metrics_file: str | None = _sagemaker(
        "Tab-separated file of metric names and regular expressions.",
        question="Path of a tab-separated file of metric names and regular expressions? (empty: none)",
    )
    additional_args: Mapping[str, Any] | None = _sagemaker(
        "Extra arguments of the SageMaker estimator.",
        parse=optional(json_object, "{}"),
        kind="table",
        ask_if=None,
    )
    aws_access_key_id: str | None = setting(
        help="AWS access key ID, instead of a profile.", flags=("--aws_access_key_id",), repr=False
    )
    aws_secret_access_key: str | None = setting(
        help="AWS secret access key.", flags=("--aws_secret_access_key",), repr=False
    )


SAGEMAKER = rows_of("sagemaker", SageMakerSettings, topic="Amazon SageMaker")


_PRECISIONS = tuple(member.value for member in PrecisionType)
_BACKENDS = tuple(member.value for member in DynamoBackend)
_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


@documented
@frozen
class PrecisionSettings:
    """Precision of the forward and backward passes."""

    mixed_precision: str = plain(
        "Precision of the forward and backward passes.",
        default="no",
        parse=one_of(*_PRECISIONS),
        choices=_PRECISIONS,
        question="Which mixed precision do you want?",
    )


@documented
@frozen
class TrainingSettings:
    """How the training loop steps."""

    gradient_accumulation_steps: int = plain(
        "Gradient accumulation steps: micro-batches per optimizer step; auto: set by the script.",
        default=1,
        parse=optional(integer(1), "auto"),
        key_aliases=("deepspeed_config.gradient_accumulation_steps",),
        ask_if=lambda answers: bool(answers("deepspeed")) and not answers("deepspeed.hf_ds_config"),
    )
    strategy: str | None = plain(
        "Training strategy, by name; auto chooses the first that applies.", parse=optional(str, "auto", "")
    )
    loss_chunk_size: int | None = plain(
        "Compute a causal language model's loss this many tokens at a time, without storing all logits.",
        parse=optional(integer(1), ""),
    )
    mlp_tile_size: int | None = plain(
        "Compute MLPs this many tokens at a time, and recompute them in the backward pass.",
        parse=optional(integer(1), ""),
    )


TRAINING = (
    *rows_of("precision", PrecisionSettings, topic="training"),
    *rows_of("training", TrainingSettings, topic="training"),
)


def _dynamo(help: str, **more: Any) -> Any:  # noqa: A002 - as the field is called
    def derive(field: str) -> dict[str, Any]:
        name = f"dynamo_{field}"
        row = spelled(name, "dynamo_config", variable=f"ACCELERATE_{name.upper()}")
        return {**row, "ask_if": lambda answers: answers("dynamo.backend") != "NO"}

    return setting(derive, help=help, **more)


@documented
@frozen
class DynamoSettings:
    """How `torch.compile` compiles the model."""

    backend: str = _dynamo(
        "torch.compile backend (NO = off).",
        default="NO",
        choices=_BACKENDS,
        question="Which torch.compile backend do you want? (NO = off)",
        ask_if=None,
    )
    mode: str = _dynamo("torch.compile mode.", default="default", choices=_MODES)
    use_fullgraph: bool = _dynamo("Fail on graph breaks (fullgraph).", default=False)
    use_dynamic: bool = _dynamo("Trace with dynamic shapes.", default=False)
    use_regional_compilation: bool = _dynamo(
        "Compile each repeated block once, not the whole model (regional compilation).", default=False
    )


DYNAMO = rows_of("dynamo", DynamoSettings, topic="compilation")
