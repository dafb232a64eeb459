"""World size, nodes and rendezvous of a launch."""

from __future__ import annotations

from accel_state.devices.kinds import KINDS
from accel_state.labels import DistributedType
from accel_state.settings.option import Answers, Option
from accel_state.settings.parsing import boolean, integer, number, one_of, optional

_OF_DEVICES = {kind.distributed_type for kind in KINDS if kind.runtime is None}
DEVICE_TYPES = tuple(one.value for one in DistributedType if one in _OF_DEVICES)
"""The values of `distributed_type` that only say on what processes compute."""

ENGINE_TYPES = {"FSDP": "fsdp", "DEEPSPEED": "deepspeed", "MEGATRON_LM": "megatron"}
"""The values of `distributed_type` that switch on an engine, and its section of `Settings`."""

SAGEMAKER_TYPES = ("DATA_PARALLEL", "MODEL_PARALLEL")
DISTRIBUTED_TYPES = (*DEVICE_TYPES, *ENGINE_TYPES, "XLA", *SAGEMAKER_TYPES)
"""All values of `distributed_type`."""

_TOPIC = "processes and machines"
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


LAUNCH = (
    Option(
        path="launch.compute_environment",
        help="Where the script runs.",
        topic=_TOPIC,
        parse=one_of(*_ENVIRONMENTS),
        choices=_ENVIRONMENTS,
        key="compute_environment",
        question="Where do you train?",
    ),
    Option(
        path="launch.distributed_type",
        help="On what the processes compute; --multi_gpu: one process per GPU, an error where there is none;"
        " --tpu: one per chip.",
        topic=_TOPIC,
        parse=lambda text: one_of(*DISTRIBUTED_TYPES)("XLA" if text.upper() == "TPU" else text),
        choices=DISTRIBUTED_TYPES,
        flags=("--multi_gpu",),
        const="MULTI_GPU",
        flag_aliases=(("--tpu", "XLA"),),
        key="distributed_type",
        question="On what do the processes compute?",
    ),
    Option(
        path="launch.launcher",
        help="What starts the processes, by its name; auto chooses the first that applies.",
        topic=_TOPIC,
        parse=optional(str, "auto", ""),
        flags=("--launcher",),
        key="launcher",
        skip_reason="The answers choose it.",
    ),
    Option(
        path="launch.num_machines",
        help="Number of nodes (machines).",
        topic=_TOPIC,
        parse=integer(1),
        flags=("--num_machines",),
        key="num_machines",
        question="How many nodes (machines)?",
        ask_if=lambda answers: not is_local(answers) or _several_processes(answers),
    ),
    Option(
        path="launch.num_processes",
        help="World size: number of processes on all nodes; by default one per device.",
        topic=_TOPIC,
        parse=optional(integer(1), "-1"),
        flags=("--num_processes",),
        key="num_processes",
        question="How many processes on all nodes? (world size)",
        ask_if=lambda answers: is_local(answers) and answers("launch.distributed_type") != "NO",
    ),
    Option(
        path="launch.min_machines",
        help="Go on with as few machines as this when others leave; with a rendezvous that is not static.",
        topic=_TOPIC,
        parse=integer(1),
        flags=("--min_machines",),
        key="min_machines",
        skip_reason="It belongs to one run rather than to a machine.",
    ),
    Option(
        path="launch.machine_rank",
        help="Node rank of this machine, from 0.",
        topic=_TOPIC,
        parse=integer(0),
        flags=("--machine_rank",),
        key="machine_rank",
        question="What is the node rank of this machine, counted from 0?",
        ask_if=several_machines,
    ),
    Option(
        path="launch.main_process_ip",
        help="Host name or address of node 0, which runs rank 0.",
        topic=_TOPIC,
        flags=("--main_process_ip",),
        key="main_process_ip",
        question="What is the address of node 0, which runs rank 0?",
        ask_if=several_machines,
    ),
    Option(
        path="launch.main_process_port",
        help="TCP port of the rendezvous on node 0; 0 picks a free one, with a single node.",
        topic=_TOPIC,
        parse=integer(0, 65535),
        flags=("--main_process_port",),
        key="main_process_port",
        question="Which TCP port of node 0 does the rendezvous use?",
        ask_if=several_machines,
    ),
    Option(
        path="launch.rdzv_backend",
        help="Rendezvous backend: static, or one of torch.distributed.run.",
        topic=_TOPIC,
        flags=("--rdzv_backend",),
        key="rdzv_backend",
        question="Which rendezvous backend? (static: node ranks as given; c10d: in any order)",
        ask_if=several_machines,
    ),
    Option(
        path="launch.rdzv_conf",
        help="Further configuration of the rendezvous, as key=value,key=value.",
        topic=_TOPIC,
        flags=("--rdzv_conf",),
        key="rdzv_conf",
        skip_reason="It is only needed where the usual configuration of a rendezvous fails.",
    ),
    Option(
        path="launch.same_network",
        help="The machines are on one network. Config files say it; nothing depends on it.",
        topic=_TOPIC,
        parse=boolean,
        flags=("--same_network",),
        const="true",
        key="same_network",
        skip_reason="Nothing depends on it.",
    ),
    Option(
        path="launch.gpu_ids",
        help="The devices of this machine to use, as 0,1; by default all.",
        topic=_TOPIC,
        flags=("--gpu_ids",),
        key="gpu_ids",
        question="Which devices of this machine, by number and with commas between? (all for all)",
        ask_if=_has_devices,
    ),
    Option(
        path="launch.num_cpu_threads_per_process",
        help="Threads per process (OMP_NUM_THREADS); by default several processes share the cores.",
        topic=_TOPIC,
        parse=integer(1),
        flags=("--num_cpu_threads_per_process",),
        key="num_cpu_threads_per_process",
        question="How many threads per process?",
        ask_if=lambda answers: is_local(answers) and answers("launch.distributed_type") == "MULTI_CPU",
    ),
    Option(
        path="launch.max_restarts",
        help="How often a failed group of workers is started again.",
        topic=_TOPIC,
        parse=integer(0),
        flags=("--max_restarts",),
        key="max_restarts",
        skip_reason="It belongs to one run rather than to a machine.",
    ),
    Option(
        path="launch.monitor_interval",
        help="Seconds between checks of the workers.",
        topic=_TOPIC,
        parse=number(0, of="seconds"),
        flags=("--monitor_interval",),
        key="monitor_interval",
        skip_reason="The default suits all but tests.",
    ),
    Option(
        path="launch.tee",
        help="Which streams go to the console and to a file, as torch.distributed.run --tee takes it.",
        topic=_TOPIC,
        flags=("-t", "--tee"),
        key="tee",
        skip_reason="It belongs to one run rather than to a machine.",
    ),
    Option(
        path="launch.log_dir",
        help="Folder of the log files of the workers.",
        topic=_TOPIC,
        flags=("--log_dir",),
        key="log_dir",
        skip_reason="It belongs to one run rather than to a machine.",
    ),
    Option(
        path="launch.role",
        help="Role of the workers, in logs.",
        topic=_TOPIC,
        flags=("--role",),
        key="role",
        skip_reason="It belongs to one run rather than to a machine.",
    ),
    Option(
        path="launch.module",
        help="The script is the name of a module, as for python -m.",
        topic=_TOPIC,
        parse=boolean,
        flags=("-m", "--module"),
        const="true",
        skip_reason=_FROM_FILE,
    ),
    Option(
        path="launch.no_python",
        help="The script is a program of its own.",
        topic=_TOPIC,
        parse=boolean,
        flags=("--no_python",),
        const="true",
        skip_reason=_FROM_FILE,
    ),
    Option(
        path="launch.quiet",
        help="Leave out the launcher's own summary when a worker fails.",
        topic=_TOPIC,
        parse=boolean,
        flags=("-q", "--quiet"),
        const="true",
        skip_reason=_FROM_FILE,
    ),
)
"""Rows of `LaunchSettings`."""
