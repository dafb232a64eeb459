"""Run DeepSpeed's multi-node launcher with our variables exported; the only importer of DeepSpeed here."""

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
from accel_cli.launch.launchers import handle_signals
from accel_state.errors import AccelError, MissingDependencyError


def main(arguments: Sequence[str], load: Callable[[str], Any] = import_module) -> int:
    """Run DeepSpeed's launcher.

    Args:
        arguments: `--export=` with comma-separated names of variables, then DeepSpeed's own arguments.
        load: Imports a module.

    Returns:
        0; a failure and a signal are raised.
    """
    exported, *deepspeed_arguments = arguments
    try:
        runner = load("deepspeed.launcher.runner")
    except ImportError:
        raise MissingDependencyError("DeepSpeed is not installed: `pip install deepspeed`.") from None
    names = [name for name in exported.removeprefix("--export=").split(",") if name]
    runner.EXPORT_ENVS += names  # DeepSpeed exports the variables that begin with one of these.
    runners = load("deepspeed.launcher.multinode_runner")
    _pass_unchanged(runners, names)
    _end_only_this_job(runners)
    with _forward_signals():
        try:
            runner.main(deepspeed_arguments)
        except (AssertionError, OSError, RuntimeError, ValueError, subprocess.CalledProcessError) as error:
            raise AccelError(f"DeepSpeed's launcher: {error}") from None
    return 0


def _pass_unchanged(runners: Any, names: Sequence[str]) -> None:
    """Quote our variables and the arguments of the script for the runners that use a shell only.

    DeepSpeed double-quotes some of them, so that a shell still expands variables and commands. Runners
    without a shell keep the quotes in the values.
    """
    add_export_of_deepspeed = runners.MultiNodeRunner.add_export

    def add_export(self: Any, key: str, value: str) -> None:
        if key in names:
            self.exports[key] = _quote_for_pdsh(value) if self.name == "pdsh" else value
        else:
            add_export_of_deepspeed(self, key, value)

    runners.MultiNodeRunner.add_export = add_export
    runners.PDSHRunner.parse_user_args = lambda self: [_quote_for_pdsh(word) for word in self.args.user_args]


def _end_only_this_job(runners: Any) -> None:
    """Make a signal end the processes of this job only; DeepSpeed ends those of all jobs of a user."""
    get_cmd_of_deepspeed = runners.PDSHRunner.get_cmd

    def get_cmd(self: Any, environment: Any, active_resources: Any) -> tuple[Any, list[str], Any]:
        command, kill, environ = get_cmd_of_deepspeed(self, environment, active_resources)
        master_flags = f"--master_addr={self.args.master_addr} --master_port={self.args.master_port} "
        # The brackets keep the pattern from matching the shell that runs it.
        return command, [*kill[:-1], shlex.quote(f"[d]eepspeed.launcher.launch .*{master_flags}")], environ

    runners.PDSHRunner.get_cmd = get_cmd


def _quote_for_pdsh(word: str) -> str:
    """Quote a word for the shell that pdsh starts; pdsh itself expands `%n` and others."""
    return shlex.quote(word).replace("%", "%%")


@contextlib.contextmanager
def _forward_signals() -> Generator[None]:
    """Forward signals that DeepSpeed drops; exit with their code."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    # The pipe records the first signal even if DeepSpeed has replaced these handlers.
    wakeup = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    try:
        with (
            handle_signals(("SIGINT", "SIGTERM"), _forward_signal),
            handle_signals(("SIGHUP",), _handle_as_sigterm),
        ):
            yield
    finally:
        signal.set_wakeup_fd(wakeup)
        os.close(writer)
        first = os.read(reader, 1)
        os.close(reader)
        if first:
            sys.exit(128 + first[0])


def _handle_as_sigterm(number: int, frame: FrameType | None) -> None:
    """Call the handler of SIGTERM, which DeepSpeed installs."""
    del number
    handler = signal.getsignal(signal.SIGTERM)
    if callable(handler):
        handler(signal.SIGTERM, frame)


def _forward_signal(number: int, frame: FrameType | None) -> None:
    """Send a signal to the children; Ctrl-C has reached them already if they are in the foreground."""
    del frame
    if number == signal.SIGINT:
        with contextlib.suppress(OSError), Path("/dev/tty").open(encoding="utf-8") as terminal:
            if os.tcgetpgrp(terminal.fileno()) == os.getpgrp():
                return
    for child in children():
        with contextlib.suppress(OSError):
            os.kill(child, number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
