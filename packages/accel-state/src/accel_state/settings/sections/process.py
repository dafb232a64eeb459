"""How one process runs."""

from __future__ import annotations

from dataclasses import dataclass

from accel_state.settings.option import documented, plain, rows_of, setting
from accel_state.settings.sections.launch import is_local

_ONE_RUN = "It belongs to one run rather than to a machine."


@documented
@dataclass(frozen=True, slots=True, kw_only=True)
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
