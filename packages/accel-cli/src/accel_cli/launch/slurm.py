"""Run a Slurm job: write its batch script, submit it, follow its output, return its exit code."""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from accel_cli.arguments import FLAGS
from accel_cli.launch.launchers import Command, require_script, say
from accel_cli.main import ERROR
from accel_state.errors import SettingsError
from accel_state.settings import Layer
from accel_state.settings.model import as_text

if TYPE_CHECKING:
    from accel_cli.launch.command import LaunchPlan


def slurm_command(plan: LaunchPlan) -> Command:
    """Return this module, with the batch script, as the program."""
    require_script(plan)
    line = (sys.executable, "-m", "accel_cli.launch.slurm", batch_script(plan))
    return Command(command=line, environ=plan.environ)


def batch_script(plan: LaunchPlan) -> str:
    """Return the batch script, which runs `accel launch` on each node of the job."""
    launch, nodes = plan.launch, plan.launch.num_machines
    step = ["srun", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1", "--kill-on-bad-exit=1"]
    label = ["--label"] if nodes > 1 else []
    return "\n".join(
        [
            "#!/bin/bash",
            *(f"#SBATCH {shlex.join(words)}" for words in _sbatch_options(plan)),
            "",
            "# Bash is to wait for the step, which gets this signal, too, and saves.",
            "trap : TERM",
            "# srun of Slurm 22.05 and newer does not read what was asked of sbatch.",
            '[ -z "${SLURM_CPUS_PER_TASK:-}" ] || export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"',
            shlex.join([*step, *label, *_node_command(plan)]),
            "code=$?",
            *(_RESTART.format(restarts=launch.max_restarts).splitlines() if launch.max_restarts else []),
            'exit "$code"',
            "",
        ]
    )


_RESTART = """\
if [ "$code" -ne 0 ] && [ "${{SLURM_RESTART_COUNT:-0}}" -lt {restarts} ]; then
    echo "accel launch: the job ended with $code and is queued again" >&2
    scontrol requeue "$SLURM_JOB_ID"
fi"""

_GRACE = 120
"""Seconds before the time limit at which a job to be requeued gets SIGTERM, so that it saves."""


def _sbatch_options(plan: LaunchPlan) -> Iterator[list[str]]:
    launch, cluster = plan.launch, plan.merged.settings.cluster
    name = re.sub(r"[^\w.-]", "_", Path(plan.script).stem)
    yield [f"--job-name={name}"]
    yield [f"--nodes={launch.num_machines}"]
    yield ["--ntasks-per-node=1"]
    if cluster.gpus_per_node is not None:
        yield [f"--gres=gpu:{cluster.gpus_per_node}"]
    if cluster.time is not None:
        yield [f"--time={cluster.time}"]
    yield ["--output=slurm-%j.out"]
    yield ["--open-mode=append"]
    if launch.max_restarts:
        yield ["--requeue"]
        yield [f"--signal=TERM@{_GRACE}"]
    else:
        yield ["--no-requeue"]
    origin = plan.merged.source_of("cluster.sbatch_args").origin
    for text in cluster.sbatch_args:  # Later options take precedence.
        yield _split_options(text, origin)


def _split_options(text: str, origin: str) -> list[str]:
    """Split options as a shell does.

    Raises:
        SettingsError: The text is not a list of options, or does not fit on a line of the script.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise SettingsError(f"{origin} is {text!r}, which a shell cannot read ({error}).") from None
    if not words or not words[0].startswith("-") or not text.isprintable():
        raise SettingsError(f"{origin} is {text!r}: expected options of sbatch, such as '--partition=a'.")
    return words


def _node_command(plan: LaunchPlan) -> list[str]:
    """Return the command of each node: the user's, without flags for the job."""
    words = pass_on_flags(plan, _OF_JOB)
    if plan.launch.shutdown_timeout is None and plan.launch.max_restarts:
        words.append(f"--shutdown_timeout={_GRACE - 10}")
    words += ["--launcher=auto", f"--num_machines={plan.launch.num_machines}"]
    words += [f"--num_processes={plan.launch.num_processes}", "--", plan.script, *plan.script_arguments]
    return [sys.executable, "-m", "accel_cli", "launch", *words]


_OF_JOB = ("launch.launcher", "launch.num_machines", "launch.num_processes", "launch.max_restarts")


def pass_on_flags(plan: LaunchPlan, others: Collection[str]) -> list[str]:
    """Return as flags the config file, the user's arguments, and what is set of the launch by other means.

    Those of the job are left out; settings that are not of the launch have variables.
    """
    words = [] if plan.config_file is None else ["--config_file", str(Path(plan.config_file).absolute())]
    for path, source in plan.merged.sourced.items():
        is_set = source.layer is Layer.ARGUMENT or (
            path in _WITHOUT_VARIABLE and source.layer < Layer.DEFAULT
        )
        if is_set and path not in others and not path.startswith("cluster."):
            words += _flags(path, source.value)
    return words


_WITHOUT_VARIABLE = tuple(
    f"launch.{name}"
    for name in (
        *("distributed_type", "num_cpu_threads_per_process", "shutdown_timeout", "max_restarts"),
        *("monitor_interval", "tee", "log_dir", "role", "module", "no_python"),
    )
)
"""Settings of the launch on each node that workers do not read, so that they have no variable."""


def _flags(path: str, value: object) -> list[str]:
    """Return the flags that set a setting to a value."""
    names = {name: flag for name, flag in FLAGS.items() if flag.option.path == path}
    constants = {flag.const: name for name, flag in names.items()}
    if (text := as_text(value)) in constants:
        return [constants[text]]
    name, flag = next((item for item in names.items() if item[0].startswith("--")), ("", None))
    if flag is None:  # a kind of run that has no flag, such as one process
        return []
    texts = map(as_text, value) if flag.option.kind == "list" and isinstance(value, tuple) else [text]
    return [f"{name}={text}" for text in texts]


def main(arguments: Sequence[str]) -> int:
    """Submit a job and follow it.

    Args:
        arguments: The batch script.

    Returns:
        The exit code of the job; 1 if it has none, as at its time limit; 128 plus the number of the signal
        that cancelled it; or 2 if it was not accepted.
    """
    (script,) = arguments
    done = subprocess.run(["sbatch", "--parsable"], input=script, capture_output=True, text=True, check=False)
    sys.stderr.write(done.stderr)
    if done.returncode:
        return ERROR
    job = done.stdout.strip().partition(";")[0]  # The name of the cluster may follow.
    say(f"job {job} was submitted. Press Ctrl-C to cancel it")
    return JobFollower(job).follow()


_ENDED = frozenset({"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "OUT_OF_MEMORY", "TIMEOUT"})
_QUEUED_AGAIN = frozenset({"NODE_FAIL", "PREEMPTED"})
"""States after which Slurm requeues a job, if requested."""

_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 5.0
"""Seconds between two requests to the scheduler, which is shared: longer while nothing changes."""

_SIGNALS = {
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2")
    if hasattr(signal, name)  # Windows lacks some of them
}


class JobFollower:
    """Show the output of a job until it ends; forward signals to it.

    Args:
        job: The number of the job.
    """

    def __init__(self, job: str) -> None:
        self._job = job
        self._shown: dict[str, int] = {}  # Bytes of each file of output.

    def follow(self) -> int:
        """Follow the job to its end; return its exit code."""
        # Waiting for signals replaces the pause; child processes never get them.
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        cancelled, pause, records = 0, _PAUSE_S, list[dict[str, str]]()
        while True:
            latest = show_job(self._job)
            records = latest or records
            is_new = sum(self._show(record) for record in records) > 0
            if latest == [] or (records and all(map(has_ended, records))):
                break
            pause = _PAUSE_S if is_new else min(pause * 1.5, _LONGEST_PAUSE_S)
            received = signal.sigtimedwait(_SIGNALS, pause)
            if received is not None:
                cancelled = self._pass_on(received.si_signo) or cancelled
        states = ", ".join(dict.fromkeys(record["JobState"] for record in records)) or "UNKNOWN"
        if states != "COMPLETED":
            say(f"job {self._job} has ended: {states}")
        codes = [exit_code(record) for record in records] or [1]
        return 128 + cancelled if cancelled else next(filter(None, codes), 0)

    def _pass_on(self, number: int) -> int:
        """Cancel the job, or send it a user signal; return the signal that cancels it, else 0."""
        name = signal.Signals(number).name
        is_end = name in {"SIGINT", "SIGTERM"}
        words = ["scancel", *([] if is_end else [f"--signal={name.removeprefix('SIG')}"]), self._job]
        subprocess.run(words, check=False)
        return number if is_end else 0

    def _show(self, record: Mapping[str, str]) -> bool:
        """Write new output of a job from its output file; return whether there was any."""
        path = record.get("StdOut", "")
        try:
            with Path(path).open("rb") as file:
                file.seek(self._shown.get(path, 0))
                text = file.read()
        except OSError:  # The job has not started, or its output file is only visible on its nodes.
            return False
        self._shown[path] = self._shown.get(path, 0) + len(text)
        sys.stdout.buffer.write(text)
        sys.stdout.buffer.flush()
        return bool(text)


def show_job(job: str) -> list[dict[str, str]] | None:
    """Return Slurm's status of a job: a record for each task of an array.

    Returns:
        None if the scheduler does not respond; empty if it no longer knows the job.
    """
    done = subprocess.run(
        ["scontrol", "--oneliner", "show", "job", job], capture_output=True, text=True, check=False
    )
    if done.returncode:
        return [] if "Invalid job id" in done.stderr else None
    return [parse_record(line) for line in done.stdout.splitlines() if line.strip()]


def parse_record(line: str) -> dict[str, str]:
    """Parse a line of `scontrol --oneliner`.

    Example:
        >>> parse_record("JobId=7 JobState=RUNNING StdOut=/my runs/slurm-7.out Power=")
        {'JobId': '7', 'JobState': 'RUNNING', 'StdOut': '/my runs/slurm-7.out', 'Power': ''}
    """
    return dict(re.findall(r"(\S+?)=(.*?)(?=\s+[\w:/]+=|\s*$)", line))


def has_ended(record: Mapping[str, str]) -> bool:
    """Return whether a job has ended and will not restart.

    Example:
        >>> has_ended({"JobState": "PREEMPTED", "Requeue": "1"}), has_ended({"JobState": "FAILED"})
        (False, True)
    """
    state = record["JobState"]
    return state in _ENDED or (state in _QUEUED_AGAIN and record.get("Requeue") != "1")


def exit_code(record: Mapping[str, str]) -> int:
    """Return the exit code of a job that has ended, in a shell's convention.

    Example:
        >>> exit_code({"JobState": "FAILED", "ExitCode": "3:0"})
        3
        >>> exit_code({"JobState": "CANCELLED", "ExitCode": "0:15"})
        143
        >>> exit_code({"JobState": "TIMEOUT", "ExitCode": "0:0"})
        1
    """
    code, _, number = record.get("ExitCode", "").partition(":")
    if int(number or 0):
        return 128 + int(number)
    return int(code or 0) or int(record["JobState"] != "COMPLETED")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
