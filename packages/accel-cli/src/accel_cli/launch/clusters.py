"""What the launchers of clusters share: the command of each node, and following a job to its end."""

from __future__ import annotations

import queue
import signal
from typing import Protocol

from accel_cli.arguments import FLAGS
from accel_cli.launch.launchers import STOP_SIGNALS, handle_signals
from accel_cli.launch.plan import LaunchPlan
from accel_state.settings import Layer, Option, to_environ
from accel_state.settings.model import TITLES, as_text, value_at


class ClusterJob(Protocol):
    """A submitted job."""

    def poll(self) -> int | None:
        """Show new output; return the exit code once the job has ended."""
        ...

    def cancel(self, number: int) -> None:
        """End the job, since a termination signal has arrived."""
        ...

    def forward(self, number: int) -> None:
        """Send a user signal to the processes of the job."""
        ...


def follow(job: ClusterJob, pause: float, *more_signals: str) -> int:
    """Follow a job to its end, and pass on signals.

    Args:
        job: The job.
        pause: Seconds between two polls.
        more_signals: Names of signals that end the job in addition to SIGINT and SIGTERM.

    Returns:
        Its exit code, or 128 plus the number of the signal that has cancelled it.
    """
    signals: queue.SimpleQueue[int] = queue.SimpleQueue()
    names, cancelled = ("SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2", *more_signals), 0
    with handle_signals(names, lambda number, _: signals.put(number)):
        while (code := job.poll()) is None:
            try:
                number = signals.get(timeout=pause)
            except queue.Empty:
                continue
            if number not in STOP_SIGNALS:
                job.forward(number)
            elif cancelled and number == signal.SIGINT:  # Ctrl-C again
                break
            else:
                cancelled = cancelled or number
                job.cancel(number)
    return 128 + cancelled if cancelled else code or 0


def node_flags(plan: LaunchPlan, *of_job: str) -> list[str]:
    """Return the flags of `accel launch` on a node, for what `to_environ` does not hand over as variables.

    Nodes need not have the config file and the environment of this machine. Another launcher in a file of
    theirs is not used: it would submit a job on each node.

    Args:
        plan: The plan of the job.
        of_job: Paths of settings that the job itself replaces.
    """
    variables = to_environ(plan.settings)
    words = ["--launcher=auto"]
    for path, source in plan.merged.sourced.items():
        option = OPTION_OF.get(path)
        if option is None or path in (*_OF_JOB, *of_job) or option.section in _OF_OTHERS:
            continue
        is_used = option.section not in TITLES or value_at(plan.settings, option.section)
        if source.layer < Layer.DEFAULT and is_used and option.variable not in variables:
            words += _flags(option, source.value)
    return words


_OF_JOB = ("launch.launcher", "launch.num_machines", "launch.num_processes", "launch.compute_environment")
_OF_OTHERS = ("cluster", "sagemaker", "tpu", "mpi")
"""Sections that other launchers read."""

OPTION_OF = {flag.option.path: flag.option for flag in FLAGS.values()}


def _flags(option: Option, value: object) -> list[str]:
    """Return the flags that set a setting to a value."""
    names = {name: flag for name, flag in FLAGS.items() if flag.option is option}
    constants = {flag.const: name for name, flag in names.items()}
    if (text := as_text(value)) in constants:
        return [constants[text]]
    name = next((name for name, flag in names.items() if flag.const is None and name[:2] == "--"), None)
    if name is None:  # a kind of run that has no flag, such as one process
        return []
    texts = map(as_text, value) if option.kind == "list" and isinstance(value, tuple) else [text]
    return [f"{name}={text}" for text in texts]
