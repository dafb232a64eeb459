"""The table of settings: one row per knob, from which every reader and writer of settings is derived."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from accel_state.environ import str_to_bool
from accel_state.labels import DynamoBackend, PrecisionType

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One knob.

    Args:
        path: Where it is in `Settings`, as `"section.field"`.
        help: One sentence for the command's help and the reference page.
        parse: Text to value; raises `ValueError` that says what was expected. None means "not given".
        choices: The texts that are allowed, as they are written; the empty tuple allows what `parse` does.
        variable: The environment variable; None for what concerns only the command.
        flags: Command line flags, spelled with underscores.
        const: What a flag without a value stands for; None if the flag takes a value.
        key: The key of a config file; a dot leads into a nested table.
        question: What the interactive configuration asks; None if it does not.
    """

    path: str
    help: str
    parse: Callable[[str], object] = str
    choices: tuple[str, ...] = ()
    variable: str | None = None
    flags: tuple[str, ...] = ()
    const: str | None = None
    key: str | None = None
    question: str | None = None


def _flag(text: str) -> bool:
    try:
        return bool(str_to_bool(text))
    except ValueError:
        raise ValueError("expected 'true' or 'false' (or yes/no, on/off, 1/0)") from None


def _whole(low: int, high: float = math.inf) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = None
        if number is None or not low <= number <= high:
            between = f"of at least {low}" if high == math.inf else f"from {low} to {high}"
            raise ValueError(f"expected a whole number {between}")
        return number

    return parse


def _processes(text: str) -> int | None:
    """A config file says -1 for "find out"."""
    return None if text.strip() == "-1" else _whole(1)(text)


def _seconds(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise ValueError("expected a number of seconds")
    return number


def _one_of(*choices: str) -> Callable[[str], str]:
    """Accept any of these, in any case, and return it as it is written here."""
    by_lower = {choice.lower(): choice for choice in choices}

    def parse(text: str) -> str:
        try:
            return by_lower[text.strip().lower()]
        except KeyError:
            raise ValueError(f"expected one of {', '.join(map(repr, choices))}") from None

    return parse


_DEVICE_FAMILIES = ("CPU", "GPU", "NPU", "MLU", "SDAA", "MUSA", "XPU", "HPU", "NEURON")
DISTRIBUTED_TYPES = ("NO", *(f"MULTI_{family}" for family in _DEVICE_FAMILIES))
"""The values of `distributed_type` that this release can run."""

_PRECISIONS = tuple(member.value for member in PrecisionType)
_BACKENDS = tuple(member.value for member in DynamoBackend)
_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")

_PROCESS = (
    Option(
        path="process.use_cpu",
        help="Compute on the CPU, whatever else there is.",
        parse=_flag,
        variable="ACCELERATE_USE_CPU",
        flags=("--cpu",),
        const="true",
        key="use_cpu",
        question="Do you want to run on the CPU only?",
    ),
    Option(
        path="process.debug",
        help="Check before every collective that all ranks make the same call.",
        parse=_flag,
        variable="ACCELERATE_DEBUG_MODE",
        flags=("--debug",),
        const="true",
        key="debug",
        question="Should collectives be checked while running? (slower, for debugging)",
    ),
    Option(
        path="process.torch_device",
        help="The device to use, such as cuda:1, in place of the one that the local rank gets.",
        variable="ACCELERATE_TORCH_DEVICE",
    ),
    Option(
        path="process.cpu_affinity",
        help="Pin each process to the CPU cores near its device (NVIDIA only).",
        parse=_flag,
        variable="ACCELERATE_CPU_AFFINITY",
        flags=("--enable_cpu_affinity",),
        const="true",
        key="enable_cpu_affinity",
        question="Should processes be pinned to the CPU cores near their device?",
    ),
    Option(
        path="process.log_level",
        help="The level of loggers that are not given one.",
        variable="ACCELERATE_LOG_LEVEL",
    ),
    Option(
        path="process.enable_rich",
        help="Show tracebacks with rich.",
        parse=_flag,
        variable="ACCELERATE_ENABLE_RICH",
    ),
)

_TRAINING = (
    Option(
        path="precision.mixed_precision",
        help="The precision of forward and backward passes.",
        parse=_one_of(*_PRECISIONS),
        choices=_PRECISIONS,
        variable="ACCELERATE_MIXED_PRECISION",
        flags=("--mixed_precision",),
        key="mixed_precision",
        question="Which mixed precision do you want?",
    ),
    Option(
        path="training.gradient_accumulation_steps",
        help="Micro-batches per optimizer step.",
        parse=_whole(1),
        variable="ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
        flags=("--gradient_accumulation_steps",),
        key="gradient_accumulation_steps",
    ),
    Option(
        path="dynamo.backend",
        help="The compiler behind torch.compile; no compiles nothing.",
        parse=_one_of(*_BACKENDS),
        choices=_BACKENDS,
        variable="ACCELERATE_DYNAMO_BACKEND",
        flags=("--dynamo_backend",),
        key="dynamo_config.dynamo_backend",
        question="Which backend should compile the model?",
    ),
    Option(
        path="dynamo.mode",
        help="The mode of torch.compile.",
        parse=_one_of(*_MODES),
        choices=_MODES,
        variable="ACCELERATE_DYNAMO_MODE",
        flags=("--dynamo_mode",),
        key="dynamo_config.dynamo_mode",
        question="Which mode of torch.compile do you want?",
    ),
    Option(
        path="dynamo.use_fullgraph",
        help="Fail rather than break the model into several graphs.",
        parse=_flag,
        variable="ACCELERATE_DYNAMO_USE_FULLGRAPH",
        flags=("--dynamo_use_fullgraph",),
        const="true",
        key="dynamo_config.dynamo_use_fullgraph",
        question="Must the model compile into one graph?",
    ),
    Option(
        path="dynamo.use_dynamic",
        help="Trace with dynamic shapes.",
        parse=_flag,
        variable="ACCELERATE_DYNAMO_USE_DYNAMIC",
        flags=("--dynamo_use_dynamic",),
        const="true",
        key="dynamo_config.dynamo_use_dynamic",
        question="Should shapes be traced as dynamic?",
    ),
    Option(
        path="dynamo.use_regional_compilation",
        help="Compile each repeated block once instead of the whole model.",
        parse=_flag,
        variable="ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION",
        flags=("--dynamo_use_regional_compilation",),
        const="true",
        key="dynamo_config.dynamo_use_regional_compilation",
        question="Should repeated blocks be compiled once each?",
    ),
)

_LAUNCH = (
    Option(
        path="launch.num_processes",
        help="Processes on all machines together; by default one per device.",
        parse=_processes,
        flags=("--num_processes",),
        key="num_processes",
        question="How many processes in total?",
    ),
    Option(
        path="launch.num_machines",
        help="How many machines take part.",
        parse=_whole(1),
        flags=("--num_machines",),
        key="num_machines",
        question="How many machines take part?",
    ),
    Option(
        path="launch.machine_rank",
        help="Index of this machine among them, from 0.",
        parse=_whole(0),
        flags=("--machine_rank",),
        key="machine_rank",
        question="What is the rank of this machine?",
    ),
    Option(
        path="launch.distributed_type",
        help="Use one process per GPU, and fail where there is none.",
        parse=_one_of(*DISTRIBUTED_TYPES),
        choices=DISTRIBUTED_TYPES,
        flags=("--multi_gpu",),
        const="MULTI_GPU",
        key="distributed_type",
        question="Which devices do you use?",
    ),
    Option(
        path="launch.gpu_ids",
        help="The devices of this machine to use, as 0,1; by default all.",
        flags=("--gpu_ids",),
        key="gpu_ids",
        question="Which devices of this machine, by id?",
    ),
    Option(
        path="launch.main_process_ip",
        help="Host name or address of the machine of rank 0.",
        flags=("--main_process_ip",),
        key="main_process_ip",
        question="What is the address of the machine of rank 0?",
    ),
    Option(
        path="launch.main_process_port",
        help="TCP port there; 0 picks a free one, on one machine.",
        parse=_whole(0, 65535),
        flags=("--main_process_port",),
        key="main_process_port",
        question="Which port of that machine?",
    ),
    Option(
        path="launch.same_network",
        help="The machines are on one network. Config files say it; nothing depends on it.",
        parse=_flag,
        flags=("--same_network",),
        const="true",
        key="same_network",
    ),
    Option(
        path="launch.num_cpu_threads_per_process",
        help="Threads per process (OMP_NUM_THREADS); by default several processes share the cores.",
        parse=_whole(1),
        flags=("--num_cpu_threads_per_process",),
        key="num_cpu_threads_per_process",
    ),
    Option(
        path="launch.rdzv_backend",
        help="How machines meet: static, or a rendezvous backend of torch.distributed.run.",
        flags=("--rdzv_backend",),
        key="rdzv_backend",
    ),
    Option(
        path="launch.rdzv_conf",
        help="Further configuration of the rendezvous, as key=value,key=value.",
        flags=("--rdzv_conf",),
        key="rdzv_conf",
    ),
    Option(
        path="launch.max_restarts",
        help="How often a failed group of workers is started again.",
        parse=_whole(0),
        flags=("--max_restarts",),
        key="max_restarts",
    ),
    Option(
        path="launch.monitor_interval",
        help="Seconds between looks at the workers.",
        parse=_seconds,
        flags=("--monitor_interval",),
        key="monitor_interval",
    ),
    Option(
        path="launch.tee",
        help="Which streams go to the console and to a file, as torch.distributed.run --tee takes it.",
        flags=("-t", "--tee"),
        key="tee",
    ),
    Option(
        path="launch.log_dir",
        help="Folder of the log files of the workers.",
        flags=("--log_dir",),
        key="log_dir",
    ),
    Option(
        path="launch.role",
        help="What the workers are called in logs.",
        flags=("--role",),
        key="role",
    ),
    Option(
        path="launch.module",
        help="The script is the name of a module, as for python -m.",
        parse=_flag,
        flags=("-m", "--module"),
        const="true",
    ),
    Option(
        path="launch.no_python",
        help="The script is a program of its own.",
        parse=_flag,
        flags=("--no_python",),
        const="true",
    ),
    Option(
        path="launch.quiet",
        help="Leave out the launcher's own summary when a worker fails.",
        parse=_flag,
        flags=("-q", "--quiet"),
        const="true",
    ),
)

OPTIONS: tuple[Option, ...] = _PROCESS + _TRAINING + _LAUNCH
"""Every knob, in the order of the help text."""

BY_VARIABLE: Mapping[str, Option] = {option.variable: option for option in OPTIONS if option.variable}
"""The knobs that have an environment variable, by its name."""

BY_KEY: Mapping[str, Option] = {option.key: option for option in OPTIONS if option.key}
"""The knobs that a config file can hold, by their key."""
