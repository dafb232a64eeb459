"""DeepSpeed's launcher, handing over the variables of settings too. This is where DeepSpeed is imported."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Generator, Sequence
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any

from accel_cli.launch.elastic import children
from accel_cli.launch.launchers import run_program
from accel_state.errors import AccelError, MissingDependencyError


def main(arguments: Sequence[str], load: Callable[[str], Any] = import_module) -> None:
    """Run DeepSpeed's launcher: `--export=` and names with commas between, then its own arguments."""
    exported, *rest = arguments
    try:
        runner = load("deepspeed.launcher.runner")
    except ImportError:
        raise MissingDependencyError("DeepSpeed is not installed: `pip install deepspeed`.") from None
    names = [name for name in exported.removeprefix("--export=").split(",") if name]
    runner.EXPORT_ENVS += names  # it hands over what begins with one of these
    runners = load("deepspeed.launcher.multinode_runner")
    _pass_unchanged(runners, names)
    _end_only_this_job(runners)
    with _forwarding():
        try:
            runner.main(rest)
        except (AssertionError, OSError, RuntimeError, ValueError, subprocess.CalledProcessError) as error:
            raise AccelError(f"DeepSpeed's launcher: {error}") from None


def _pass_unchanged(runners: Any, names: Sequence[str]) -> None:
    """Let our variables and the arguments of the script arrive as they are.

    DeepSpeed puts double quotes around some. A shell takes them away, but not everything in them is safe
    from it; and where there is no shell they stay.
    """
    others = runners.MultiNodeRunner.add_export

    def add_export(self: Any, key: str, value: str) -> None:
        if key in names:
            self.exports[key] = _for_pdsh(value) if self.name == "pdsh" else value
        else:
            others(self, key, value)

    runners.MultiNodeRunner.add_export = add_export
    runners.PDSHRunner.parse_user_args = lambda self: [_for_pdsh(word) for word in self.args.user_args]


def _end_only_this_job(runners: Any) -> None:
    """Let a signal end the processes of this job, where DeepSpeed ends those of all jobs of a user."""
    theirs = runners.PDSHRunner.get_cmd

    def get_cmd(self: Any, environment: Any, active_resources: Any) -> tuple[Any, list[str], Any]:
        command, kill, environ = theirs(self, environment, active_resources)
        master_flags = f"--master_addr={self.args.master_addr} --master_port={self.args.master_port} "
        # In brackets, so that the shell that runs this does not fit the pattern.
        return command, [*kill[:-1], shlex.quote(f"[d]eepspeed.launcher.launch .*{master_flags}")], environ

    runners.PDSHRunner.get_cmd = get_cmd


def _for_pdsh(word: str) -> str:
    """A word for a shell behind pdsh, which replaces `%n` and others itself."""
    return shlex.quote(word).replace("%", "%%")


@contextlib.contextmanager
def _forwarding() -> Generator[None]:
    """Pass signals on inside, where DeepSpeed does not, and end as they say."""
    received, noted = os.pipe()
    os.set_blocking(noted, False)
    handlers: dict[signal.Signals, Any] = {signal.SIGINT: _pass_on, signal.SIGTERM: _pass_on}
    if sys.platform != "win32":
        handlers[signal.SIGHUP] = _as_sigterm
    before = {
        number: signal.signal(number, handler)
        for number, handler in handlers.items()
        if signal.getsignal(number) != signal.SIG_IGN
    }
    wakeup = signal.set_wakeup_fd(noted, warn_on_full_buffer=False)  # whosever handler it is in the end
    try:
        yield
    finally:
        signal.set_wakeup_fd(wakeup)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(noted)
        first = os.read(received, 1)
        os.close(received)
        if first:
            sys.exit(128 + first[0])


def _as_sigterm(number: int, frame: FrameType | None) -> None:
    """Do what is done upon SIGTERM, the one that DeepSpeed knows."""
    del number
    handler = signal.getsignal(signal.SIGTERM)
    if callable(handler):
        handler(signal.SIGTERM, frame)


def _pass_on(number: int, frame: FrameType | None) -> None:
    del frame
    if number == signal.SIGINT and _is_in_foreground():
        return  # the terminal has told all
    for child in children():
        with contextlib.suppress(OSError):
            os.kill(child, number)


def _is_in_foreground() -> bool:
    """Whether keys on the terminal reach this process, and its children with it."""
    try:
        with Path("/dev/tty").open(encoding="utf-8") as terminal:
            return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    except OSError:
        return False


if __name__ == "__main__":
    sys.exit(run_program(main, sys.argv[1:]))
