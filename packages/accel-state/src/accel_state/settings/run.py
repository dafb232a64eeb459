"""Settings of a run: launch, process, remote machines and training."""

from __future__ import annotations

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
    precision,
    rows_of,
    setting,
    spelled,
)

_OF_DEVICES = {kind.distributed_type for kind in KINDS if kind.runtime is None}
DEVICE_TYPES = tuple(label.value for label in DistributedType if label in _OF_DEVICES)
"""The values of `distributed_type` that only say on what processes compute."""

ENGINE_TYPES = {"FSDP": "fsdp", "DEEPSPEED": "deepspeed", "MEGATRON_LM": "megatron"}
"""The values of `distributed_type` that switch on an engine, and its section of `Settings`."""

SAGEMAKER_TYPES = ("DATA_PARALLEL", "MODEL_PARALLEL")
DISTRIBUTED_TYPES = (*DEVICE_TYPES, *ENGINE_TYPES, "XLA", *SAGEMAKER_TYPES)
"""All values of `distributed_type`."""

_ENVIRONMENTS = ("LOCAL_MACHINE", "AMAZON_SAGEMAKER")
_FROM_FILE = "It is said by the line that starts a script."


def is_local(answers: Answers) -> bool:
    """Whether the answers so far are about machines of one's own."""
    return answers("launch.compute_environment") != "AMAZON_SAGEMAKER"


def several_machines(answers: Answers) -> bool:
    """Whether the answers so far are about several machines of one's own."""
    return is_local(answers) and answers("launch.num_machines") > 1


def _several_processes(answers: Answers) -> bool:
    return is_local(answers) and answers("launch.distributed_type") not in {"NO", "XLA"}


def _has_devices(answers: Answers) -> bool:
    without = {"NO", "MULTI_CPU", "XLA"}
    return (
        is_local(answers)
        and answers("launch.num_machines") == 1
        and answers("launch.distributed_type") not in without
    )


def _row(help: str, **more: Any) -> Any:  # noqa: A002 - as the field is called
    return setting(lambda field: {"flags": (f"--{field}",), "key": field}, help=help, **more)


@documented
@frozen
class LaunchSettings:
    """How the command starts processes. Workers do not see this: their launcher tells them who they are."""

    compute_environment: str = _row(
        "Where the script runs.",
        default="LOCAL_MACHINE",
        choices=_ENVIRONMENTS,
        question="Where do you train?",
        flags=(),
    )
    distributed_type: str | None = _row(
        "On what the processes compute; --multi_gpu: one process per GPU, an error where there is none;"
        " --tpu: one per chip.",
        parse=lambda text: one_of(*DISTRIBUTED_TYPES)("XLA" if text.upper() == "TPU" else text),
        choices=DISTRIBUTED_TYPES,
        flags=("--multi_gpu",),
        const="MULTI_GPU",
        flag_aliases=(("--tpu", "XLA"),),
        question="On what do the processes compute?",
    )
    launcher: str | None = _row(
        "What starts the processes, by its name; auto chooses the first that applies.",
        parse=optional(str, "auto", ""),
        skip_reason="The answers choose it.",
    )
    num_machines: int = _row(
        "Number of nodes (machines).",
        default=1,
        question="How many nodes (machines)?",
        ask_if=lambda answers: not is_local(answers) or _several_processes(answers),
    )
    num_processes: int | None = _row(
        "World size: number of processes on all nodes; by default one per device.",
        parse=optional(integer(1), "-1"),
        question="How many processes on all nodes? (world size)",
        ask_if=lambda answers: is_local(answers) and answers("launch.distributed_type") != "NO",
    )
    min_machines: int | None = _row(
        "Go on with as few machines as this when others leave; with a rendezvous that is not static.",
        skip_reason="It belongs to one run rather than to a machine.",
    )
    machine_rank: int = _row(
        "Node rank of this machine, from 0.",
        default=0,
        parse=integer(0),
        question="What is the node rank of this machine, counted from 0?",
        ask_if=several_machines,
    )
    main_process_ip: str | None = _row(
        "Host name or address of node 0, which runs rank 0.",
        question="What is the address of node 0, which runs rank 0?",
        ask_if=several_machines,
    )
    main_process_port: int | None = _row(
        "TCP port of the rendezvous on node 0; 0 picks a free one, with a single node.",
        parse=integer(0, 65535),
        question="Which TCP port of node 0 does the rendezvous use?",
        ask_if=several_machines,
    )
    rdzv_backend: str = _row(
        "Rendezvous backend: static, or one of torch.distributed.run.",
        default="static",
        question="Which rendezvous backend? (static: node ranks as given; c10d: in any order)",
        ask_if=several_machines,
    )
    rdzv_conf: str | None = _row(
        "Further configuration of the rendezvous, as key=value,key=value.",
        skip_reason="It is only needed where the usual configuration of a rendezvous fails.",
    )
    same_network: bool = _row(
        "The machines are on one network. Config files say it; nothing depends on it.",
        default=False,
        skip_reason="Nothing depends on it.",
    )
    gpu_ids: str | None = _row(
        "The devices of this machine to use, as 0,1; by default all.",
        question="Which devices of this machine, by number and with commas between? (all for all)",
        ask_if=_has_devices,
    )
    num_cpu_threads_per_process: int | None = _row(
        "Threads per process (OMP_NUM_THREADS); by default several processes share the cores.",
        skip_reason="The default fits, and Accelerate refuses a file with this key.",
    )
    max_restarts: int = _row(
        "How often a failed group of workers is started again.",
        default=0,
        parse=integer(0),
        skip_reason="It belongs to one run rather than to a machine.",
    )
    monitor_interval: float = _row(
        "Seconds between checks of the workers.",
        default=0.1,
        parse=number(0, of="seconds"),
        skip_reason="The default suits all but tests.",
    )
    tee: str = _row(
        "Which streams go to the console and to a file, as torch.distributed.run --tee takes it.",
        default="0",
        flags=("-t", "--tee"),
        skip_reason="It belongs to one run rather than to a machine.",
    )
    log_dir: str | None = _row(
        "Folder of the log files of the workers.",
        skip_reason="It belongs to one run rather than to a machine.",
    )
    role: str = _row(
        "Role of the workers, in logs.",
        default="default",
        skip_reason="It belongs to one run rather than to a machine.",
    )
    module: bool = _row(
        "The script is the name of a module, as for python -m.",
        default=False,
        flags=("-m", "--module"),
        skip_reason=_FROM_FILE,
        key=None,
    )
    no_python: bool = _row(
        "The script is a program of its own.",
        default=False,
        skip_reason=_FROM_FILE,
        key=None,
    )
    quiet: bool = _row(
        "Leave out the launcher's own summary when a worker fails.",
        default=False,
        flags=("-q", "--quiet"),
        skip_reason=_FROM_FILE,
        key=None,
    )

    @property
    def on_tpu(self) -> bool:
        """Whether processes run on TPUs, which have launchers of their own."""
        return self.distributed_type == "XLA"

    @property
    def device_ids(self) -> tuple[str, ...]:
        """The devices of this machine that were chosen; empty for all.

        Example:
            >>> LaunchSettings(gpu_ids="0, 2").device_ids, LaunchSettings(gpu_ids="all").device_ids
            (('0', '2'), ())
        """
        text = self.gpu_ids or "all"
        return () if text.strip().lower() == "all" else tuple(item.strip() for item in text.split(","))


LAUNCH = rows_of("launch", LaunchSettings, topic="processes and machines")


_ONE_RUN = "It belongs to one run rather than to a machine."


@documented
@frozen
class ProcessSettings:
    """How one process runs."""

    use_cpu: bool = setting(
        help="Compute on the CPU, whatever else there is.",
        default=False,
        variable="ACCELERATE_USE_CPU",
        flags=("--cpu",),
        key="use_cpu",
        question="Compute on the CPU, whatever else there is?",
        ask_if=lambda answers: is_local(answers) and answers("launch.distributed_type") == "NO",
    )
    debug: bool = setting(
        help="Check before every collective that all ranks make the same call.",
        default=False,
        variable="ACCELERATE_DEBUG_MODE",
        flags=("--debug",),
        key="debug",
        question="Check before every collective that all ranks make the same call? (slower, for debugging)",
        ask_if=lambda answers: is_local(answers) and answers("launch.distributed_type") != "NO",
    )
    torch_device: str | None = setting(
        help="The device to use, such as cuda:1, in place of the one that the local rank gets.",
        variable="ACCELERATE_TORCH_DEVICE",
        skip_reason=_ONE_RUN,
    )
    cpu_affinity: bool = setting(
        help="Pin each process to the CPU cores near its device (NVIDIA only).",
        default=False,
        variable="ACCELERATE_CPU_AFFINITY",
        flags=("--enable_cpu_affinity",),
        key="enable_cpu_affinity",
        question="Pin each process to the CPU cores near its GPU?",
        ask_if=lambda answers: is_local(answers) and answers("launch.distributed_type") == "MULTI_GPU",
    )
    log_level: str | None = setting(
        help="The level of loggers that are not given one.",
        variable="ACCELERATE_LOG_LEVEL",
        skip_reason=_ONE_RUN,
    )
    enable_rich: bool = setting(
        help="Show tracebacks with rich.",
        default=False,
        variable="ACCELERATE_ENABLE_RICH",
        skip_reason=_ONE_RUN,
    )
    as_accelerate: bool = plain(
        "Let `import accelerate` in the script, and in what it imports, be accel; needs accel-compat.",
        default=False,
        skip_reason="It is for scripts and libraries that are written for Accelerate.",
    )


PROCESS = rows_of("process", ProcessSettings, topic="each process")


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
@frozen
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
@frozen
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
@frozen
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


_PRECISIONS = tuple(member.value for member in PrecisionType)
_BACKENDS = tuple(member.value for member in DynamoBackend)
_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


def _compiles(answers: Answers) -> bool:
    return answers("dynamo.backend") != "NO"


@documented
@frozen
class PrecisionSettings:
    """In which precision the forward and backward passes compute."""

    mixed_precision: str = plain(
        "The precision of forward and backward passes.",
        default="no",
        parse=precision(*_PRECISIONS),
        choices=_PRECISIONS,
        question="In which precision do forward and backward passes compute?",
    )


@documented
@frozen
class TrainingSettings:
    """How the training loop steps."""

    gradient_accumulation_steps: int = plain(
        "Micro-batches per optimizer step; auto leaves it to the script.",
        default=1,
        parse=optional(integer(1), "auto"),
        key_aliases=("deepspeed_config.gradient_accumulation_steps",),
        question="How many micro-batches per optimizer step?",
        ask_if=lambda answers: bool(answers("deepspeed")) and not answers("deepspeed.hf_ds_config"),
    )
    strategy: str | None = plain(
        "The strategy that trains, by its name; auto chooses the first that applies.",
        parse=optional(str, "auto", ""),
        skip_reason="The questions about DeepSpeed, FSDP and parallelism choose it.",
    )
    loss_chunk_size: int | None = plain(
        "Compute the loss of a causal language model for so many tokens at a time, without all logits.",
        parse=optional(integer(1), ""),
        skip_reason="It belongs to a model and its sequences rather than to a machine.",
    )
    mlp_tile_size: int | None = plain(
        "Compute the MLPs of blocks for so many tokens at a time, and again in the backward pass.",
        parse=optional(integer(1), ""),
        skip_reason="It belongs to a model and its sequences rather than to a machine.",
    )


TRAINING = (
    *rows_of("precision", PrecisionSettings, topic="training"),
    *rows_of("training", TrainingSettings, topic="training"),
)


def _dynamo(help: str, **more: Any) -> Any:  # noqa: A002 - as the field is called
    def derive(field: str) -> dict[str, Any]:
        name = f"dynamo_{field}"
        return spelled(name, "dynamo_config", variable=f"ACCELERATE_{name.upper()}", ask_if=_compiles)

    return setting(derive, help=help, **more)


@documented
@frozen
class DynamoSettings:
    """How `torch.compile` compiles the model."""

    backend: str = _dynamo(
        "The compiler behind torch.compile; no compiles nothing.",
        default="NO",
        choices=_BACKENDS,
        question="What compiles the model? (NO: nothing does)",
        ask_if=None,
    )
    mode: str = _dynamo(
        "The mode of torch.compile.",
        default="default",
        choices=_MODES,
        question="In which mode?",
    )
    use_fullgraph: bool = _dynamo(
        "Fail rather than break the model into several graphs.",
        default=False,
        question="Fail rather than break the model into several graphs?",
    )
    use_dynamic: bool = _dynamo(
        "Trace with dynamic shapes.",
        default=False,
        question="Trace with dynamic shapes?",
    )
    use_regional_compilation: bool = _dynamo(
        "Compile each repeated block once instead of the whole model.",
        default=False,
        question="Compile each repeated block once instead of the whole model?",
    )


DYNAMO = rows_of("dynamo", DynamoSettings, topic="compilation")
