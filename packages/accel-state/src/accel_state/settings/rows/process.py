"""How one process runs."""

from __future__ import annotations

from accel_state.settings.option import Option
from accel_state.settings.parsing import boolean
from accel_state.settings.rows.launch import is_local

_TOPIC = "each process"
_ONE_RUN = "It belongs to one run rather than to a machine."

PROCESS = (
    Option(
        path="process.use_cpu",
        help="Compute on the CPU, whatever else there is.",
        topic=_TOPIC,
        parse=boolean,
        variable="ACCELERATE_USE_CPU",
        flags=("--cpu",),
        const="true",
        key="use_cpu",
        question="Compute on the CPU, whatever else there is?",
        ask_if=lambda answers: is_local(answers) and answers("launch.distributed_type") == "NO",
    ),
    Option(
        path="process.debug",
        help="Check before every collective that all ranks make the same call.",
        topic=_TOPIC,
        parse=boolean,
        variable="ACCELERATE_DEBUG_MODE",
        flags=("--debug",),
        const="true",
        key="debug",
        question="Check before every collective that all ranks make the same call? (slower, for debugging)",
        ask_if=lambda answers: is_local(answers) and answers("launch.distributed_type") != "NO",
    ),
    Option(
        path="process.torch_device",
        help="The device to use, such as cuda:1, in place of the one that the local rank gets.",
        topic=_TOPIC,
        variable="ACCELERATE_TORCH_DEVICE",
        skip_reason=_ONE_RUN,
    ),
    Option(
        path="process.cpu_affinity",
        help="Pin each process to the CPU cores near its device (NVIDIA only).",
        topic=_TOPIC,
        parse=boolean,
        variable="ACCELERATE_CPU_AFFINITY",
        flags=("--enable_cpu_affinity",),
        const="true",
        key="enable_cpu_affinity",
        question="Pin each process to the CPU cores near its GPU?",
        ask_if=lambda answers: is_local(answers) and answers("launch.distributed_type") == "MULTI_GPU",
    ),
    Option(
        path="process.log_level",
        help="The level of loggers that are not given one.",
        topic=_TOPIC,
        variable="ACCELERATE_LOG_LEVEL",
        skip_reason=_ONE_RUN,
    ),
    Option(
        path="process.enable_rich",
        help="Show tracebacks with rich.",
        topic=_TOPIC,
        parse=boolean,
        variable="ACCELERATE_ENABLE_RICH",
        skip_reason=_ONE_RUN,
    ),
    Option(
        path="process.as_accelerate",
        help="Let `import accelerate` in the script, and in what it imports, be accel; needs accel-compat.",
        topic=_TOPIC,
        parse=boolean,
        variable="ACCELERATE_AS_ACCELERATE",
        flags=("--as_accelerate",),
        const="true",
        key="as_accelerate",
        skip_reason="It is for scripts and libraries that are written for Accelerate.",
    ),
)
"""Rows of `ProcessSettings`."""
