"""How many processes, where, and how they find each other."""

from __future__ import annotations

from accel_state.settings.option import Answers, Option
from accel_state.settings.parsing import flag, maybe, number, offered, one_of, whole

_FAMILIES = ("CPU", "GPU", "NPU", "MLU", "SDAA", "MUSA", "XPU", "HPU", "NEURON")
DEVICE_TYPES = ("NO", *(f"MULTI_{family}" for family in _FAMILIES))
"""The values of `distributed_type` that only say on what processes compute."""

ENGINE_TYPES = {"FSDP": "fsdp", "DEEPSPEED": "deepspeed", "MEGATRON_LM": "megatron"}
"""The values of `distributed_type` that switch on an engine, and its section of `Settings`."""

SAGEMAKER_TYPES = ("DATA_PARALLEL", "MODEL_PARALLEL")
DISTRIBUTED_TYPES = (*DEVICE_TYPES, *ENGINE_TYPES, "XLA", *SAGEMAKER_TYPES)
"""All values of `distributed_type`."""

_TOPIC = "processes and machines"
_PLACES = ("LOCAL_MACHINE", "AMAZON_SAGEMAKER")
_FROM_FILE = "It is said by the line that starts a script."


def here(answers: Answers) -> bool:
    """Whether the answers so far are about machines of one's own."""
    return answers("launch.compute_environment") != "AMAZON_SAGEMAKER"


def several_machines(answers: Answers) -> bool:
    """Whether the answers so far are about several machines of one's own."""
    return here(answers) and answers("launch.num_machines") > 1


def _several_processes(answers: Answers) -> bool:
    return here(answers) and answers("launch.distributed_type") not in {"NO", "XLA"}


def _has_devices(answers: Answers) -> bool:
    without = {"NO", "MULTI_CPU", "XLA"}
    return (
        here(answers)
        and answers("launch.num_machines") == 1
        and answers("launch.distributed_type") not in without
    )


LAUNCH = (
    Option(
        path="launch.compute_environment",
        help="Where the script runs.",
        topic=_TOPIC,
        parse=one_of(*_PLACES),
        choices=_PLACES,
        key="compute_environment",
        question="Where do you train?",
    ),
    Option(
        path="launch.distributed_type",
        help="On what the processes compute; --multi_gpu: one process per GPU, an error where there is none;"
        " --tpu: one per chip.",
        topic=_TOPIC,
        parse=lambda text: one_of(*DISTRIBUTED_TYPES)("XLA" if text.upper() == "TPU" else text),
        choices=offered(DISTRIBUTED_TYPES),
        flags=("--multi_gpu",),
        const="MULTI_GPU",
        more_flags=(("--tpu", "XLA"),),
        key="distributed_type",
        question="On what do the processes compute?",
    ),
    Option(
        path="launch.launcher",
        help="What starts the processes, by its name; auto chooses the first that applies.",
        topic=_TOPIC,
        parse=maybe(str, "auto", ""),
        flags=("--launcher",),
        key="launcher",
        unasked="The answers choose it.",
    ),
    Option(
        path="launch.num_machines",
        help="How many machines take part.",
        topic=_TOPIC,
        parse=whole(1),
        flags=("--num_machines",),
        key="num_machines",
        question="How many machines take part?",
        when=lambda answers: not here(answers) or _several_processes(answers),
    ),
    Option(
        path="launch.num_processes",
        help="Processes on all machines together; by default one per device.",
        topic=_TOPIC,
        parse=maybe(whole(1), "-1"),
        flags=("--num_processes",),
        key="num_processes",
        question="How many processes, on all machines together?",
        when=lambda answers: here(answers) and answers("launch.distributed_type") != "NO",
    ),
    Option(
        path="launch.min_machines",
        help="Go on with as few machines as this when others leave; with a rendezvous that is not static.",
        topic=_TOPIC,
        parse=whole(1),
        flags=("--min_machines",),
        key="min_machines",
        unasked="It belongs to one run rather than to a machine.",
    ),
    Option(
        path="launch.machine_rank",
        help="Index of this machine among them, from 0.",
        topic=_TOPIC,
        parse=whole(0),
        flags=("--machine_rank",),
        key="machine_rank",
        question="Which of them is this one, counted from 0?",
        when=several_machines,
    ),
    Option(
        path="launch.main_process_ip",
        help="Host name or address of the machine of rank 0.",
        topic=_TOPIC,
        flags=("--main_process_ip",),
        key="main_process_ip",
        question="What is the address of the machine of rank 0?",
        when=several_machines,
    ),
    Option(
        path="launch.main_process_port",
        help="TCP port there; 0 picks a free one, on one machine.",
        topic=_TOPIC,
        parse=whole(0, 65535),
        flags=("--main_process_port",),
        key="main_process_port",
        question="On which port of it do the machines meet?",
        when=several_machines,
    ),
    Option(
        path="launch.rdzv_backend",
        help="How machines meet: static, or a rendezvous backend of torch.distributed.run.",
        topic=_TOPIC,
        flags=("--rdzv_backend",),
        key="rdzv_backend",
        question="How do the machines meet? (static: ranks as given; c10d: in any order)",
        when=several_machines,
    ),
    Option(
        path="launch.rdzv_conf",
        help="Further configuration of the rendezvous, as key=value,key=value.",
        topic=_TOPIC,
        flags=("--rdzv_conf",),
        key="rdzv_conf",
        unasked="It is only needed where the usual configuration of a rendezvous fails.",
    ),
    Option(
        path="launch.same_network",
        help="The machines are on one network. Config files say it; nothing depends on it.",
        topic=_TOPIC,
        parse=flag,
        flags=("--same_network",),
        const="true",
        key="same_network",
        unasked="Nothing depends on it.",
    ),
    Option(
        path="launch.gpu_ids",
        help="The devices of this machine to use, as 0,1; by default all.",
        topic=_TOPIC,
        flags=("--gpu_ids",),
        key="gpu_ids",
        question="Which devices of this machine, by number and with commas between? (all for all)",
        when=_has_devices,
    ),
    Option(
        path="launch.num_cpu_threads_per_process",
        help="Threads per process (OMP_NUM_THREADS); by default several processes share the cores.",
        topic=_TOPIC,
        parse=whole(1),
        flags=("--num_cpu_threads_per_process",),
        key="num_cpu_threads_per_process",
        question="How many threads per process?",
        when=lambda answers: here(answers) and answers("launch.distributed_type") == "MULTI_CPU",
    ),
    Option(
        path="launch.max_restarts",
        help="How often a failed group of workers is started again.",
        topic=_TOPIC,
        parse=whole(0),
        flags=("--max_restarts",),
        key="max_restarts",
        unasked="It belongs to one run rather than to a machine.",
    ),
    Option(
        path="launch.monitor_interval",
        help="Seconds between looks at the workers.",
        topic=_TOPIC,
        parse=number(0, of="seconds"),
        flags=("--monitor_interval",),
        key="monitor_interval",
        unasked="The default suits all but tests.",
    ),
    Option(
        path="launch.tee",
        help="Which streams go to the console and to a file, as torch.distributed.run --tee takes it.",
        topic=_TOPIC,
        flags=("-t", "--tee"),
        key="tee",
        unasked="It belongs to one run rather than to a machine.",
    ),
    Option(
        path="launch.log_dir",
        help="Folder of the log files of the workers.",
        topic=_TOPIC,
        flags=("--log_dir",),
        key="log_dir",
        unasked="It belongs to one run rather than to a machine.",
    ),
    Option(
        path="launch.role",
        help="What the workers are called in logs.",
        topic=_TOPIC,
        flags=("--role",),
        key="role",
        unasked="It belongs to one run rather than to a machine.",
    ),
    Option(
        path="launch.module",
        help="The script is the name of a module, as for python -m.",
        topic=_TOPIC,
        parse=flag,
        flags=("-m", "--module"),
        const="true",
        unasked=_FROM_FILE,
    ),
    Option(
        path="launch.no_python",
        help="The script is a program of its own.",
        topic=_TOPIC,
        parse=flag,
        flags=("--no_python",),
        const="true",
        unasked=_FROM_FILE,
    ),
    Option(
        path="launch.quiet",
        help="Leave out the launcher's own summary when a worker fails.",
        topic=_TOPIC,
        parse=flag,
        flags=("-q", "--quiet"),
        const="true",
        unasked=_FROM_FILE,
    ),
)
"""Rows of `LaunchSettings`."""
