"""World size, nodes and rendezvous of a launch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from accel_state.devices.kinds import KINDS
from accel_state.labels import DistributedType
from accel_state.settings.option import Answers, documented, rows_of, setting
from accel_state.settings.parsing import integer, number, one_of, optional

_OF_DEVICES = {kind.distributed_type for kind in KINDS if kind.runtime is None}
DEVICE_TYPES = tuple(one.value for one in DistributedType if one in _OF_DEVICES)
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
@dataclass(frozen=True, slots=True, kw_only=True)
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
        question="How many threads per process?",
        ask_if=lambda answers: is_local(answers) and answers("launch.distributed_type") == "MULTI_CPU",
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
        return () if text.strip().lower() == "all" else tuple(one.strip() for one in text.split(","))


LAUNCH = rows_of("launch", LaunchSettings, topic="processes and machines")
