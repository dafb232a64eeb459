"""Run a Slurm job: write its batch script, submit it, follow its output, return its exit code."""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from accel_cli.launch.clusters import follow, node_flags
from accel_cli.launch.launchers import require_program, require_script, say
from accel_cli.launch.plan import LaunchPlan
from accel_cli.main import ERROR
from accel_state.environ import set_environment
from accel_state.errors import SettingsError
from accel_state.settings import to_environ


def run(plan: LaunchPlan) -> int:
    """Submit a job and follow it.

    Returns:
        The exit code of the job; 1 if it has none, as at its time limit; 128 plus the number of the signal
        that cancelled it; or 2 if it was not accepted.
    """
    require_script(plan)
    require_program("sbatch", "--launcher slurm needs sbatch", plan.environ)
    set_environment(plan.environ)
    done = _call("sbatch", "--parsable", script=show(plan))
    sys.stderr.write(done.stderr)
    if done.returncode:
        return ERROR
    job = done.stdout.strip().partition(";")[0]  # The name of the cluster may follow.
    say(f"job {job} was submitted. Press Ctrl-C to cancel it")
    return follow(SlurmJob(job), _PAUSE)


def show(plan: LaunchPlan) -> str:
    """Return the batch script, which runs `accel launch` on each node of the job."""
    launch, nodes = plan.launch, plan.num_machines
    step = ["srun", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1", "--kill-on-bad-exit=1"]
    flags = node_flags(plan, "launch.max_restarts")
    if launch.shutdown_timeout is None and launch.max_restarts:
        flags.append(f"--shutdown_timeout={_GRACE - 10}")
    flags += [f"--num_machines={nodes}", f"--num_processes={plan.num_processes}"]
    command = [sys.executable, "-m", "accel_cli", "launch", *flags, "--", plan.script, *plan.script_arguments]
    return "\n".join(
        [
            "#!/bin/bash",
            *(f"#SBATCH {shlex.join(words)}" for words in _sbatch_options(plan)),
            "",
            *(f"export {name}={shlex.quote(value)}" for name, value in to_environ(plan.settings).items()),
            "# Bash is to wait for the step, which gets this signal, too, and saves.",
            "trap : TERM",
            "# srun of Slurm 22.05 and newer does not read what was asked of sbatch.",
            '[ -z "${SLURM_CPUS_PER_TASK:-}" ] || export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"',
            shlex.join([*step, *(["--label"] if nodes > 1 else []), *command]),
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
    cluster = plan.settings.cluster
    name = re.sub(r"[^\w.-]", "_", Path(plan.script).stem)
    yield from ([f"--job-name={name}"], [f"--nodes={plan.num_machines}"], ["--ntasks-per-node=1"])
    if cluster.gpus_per_node is not None:
        yield [f"--gres=gpu:{cluster.gpus_per_node}"]
    if cluster.time is not None:
        yield [f"--time={cluster.time}"]
    yield from (["--output=slurm-%j.out"], ["--open-mode=append"])
    yield from (
        (["--requeue"], [f"--signal=TERM@{_GRACE}"]) if plan.launch.max_restarts else (["--no-requeue"],)
    )
    origin = plan.origin("cluster.sbatch_args")
    for text in cluster.sbatch_args:  # Later options take precedence.
        try:
            words = shlex.split(text)
        except ValueError as error:
            raise SettingsError(f"{origin} is {text!r}, which a shell cannot read ({error}).") from None
        if not words or not words[0].startswith("-") or not text.isprintable():
            raise SettingsError(f"{origin} is {text!r}: expected options of sbatch, such as '--partition=a'.")
        yield words


_ENDED = frozenset({"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "OUT_OF_MEMORY", "TIMEOUT"})
_QUEUED_AGAIN = frozenset({"NODE_FAIL", "PREEMPTED"})
"""States after which Slurm requeues a job, if requested."""

_PAUSE = 1.0
"""Seconds between two requests to the scheduler, which is shared."""


class SlurmJob:
    """A job that was submitted; of an array, all its tasks."""

    def __init__(self, job: str) -> None:
        self._job = job
        self._shown: dict[str, int] = {}  # Bytes of each file of output.
        self._records: list[dict[str, str]] = []

    def poll(self) -> int | None:
        """Show new output; return the exit code once all tasks have ended, the highest of an array."""
        done = _call("scontrol", "--oneliner", "show", "job", self._job)
        is_forgotten = bool(done.returncode) and "Invalid job id" in done.stderr
        self._records = [
            parse_record(line) for line in done.stdout.splitlines() if line.strip()
        ] or self._records
        for path in {record.get("StdOut", "") for record in self._records}:
            self._show(path)
        if not is_forgotten and not (self._records and all(map(has_ended, self._records))):
            return None
        states = ", ".join(dict.fromkeys(record["JobState"] for record in self._records)) or "UNKNOWN"
        if states != "COMPLETED":
            say(f"job {self._job} has ended: {states}")
        return max(map(exit_code, self._records), default=1)

    def cancel(self, number: int) -> None:
        """Cancel the job."""
        del number
        _call("scancel", self._job)

    def forward(self, number: int) -> None:
        """Send a signal to the steps of the job."""
        _call("scancel", f"--signal={signal.Signals(number).name.removeprefix('SIG')}", self._job)

    def _show(self, path: str) -> None:
        """Write new output of a job from its output file."""
        try:
            with Path(path).open("rb") as file:
                file.seek(self._shown.get(path, 0))
                text = file.read()
        except OSError:  # The job has not started, or its output file is only visible on its nodes.
            return
        self._shown[path] = self._shown.get(path, 0) + len(text)
        sys.stdout.buffer.write(text)
        sys.stdout.buffer.flush()


def _call(*words: str, script: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run a program of Slurm in a session of its own, so that Ctrl-C does not reach it."""
    return subprocess.run(
        words, input=script, capture_output=True, text=True, check=False, start_new_session=True
    )


def parse_record(line: str) -> dict[str, str]:
    """Parse a line of `scontrol --oneliner`."""
    return dict(re.findall(r"(\S+?)=(.*?)(?=\s+[\w:/]+=|\s*$)", line))


def has_ended(record: dict[str, str]) -> bool:
    """Return whether a job has ended and will not restart."""
    state = record["JobState"]
    return state in _ENDED or (state in _QUEUED_AGAIN and record.get("Requeue") != "1")


def exit_code(record: dict[str, str]) -> int:
    """Return the exit code of a job that has ended, in a shell's convention."""
    code, _, number = record.get("ExitCode", "").partition(":")
    if int(number or 0):
        return 128 + int(number)
    return int(code or 0) or int(record["JobState"] != "COMPLETED")
