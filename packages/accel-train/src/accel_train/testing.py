"""Helpers that tests of other libraries import as `accelerate.test_utils`: run programs, find the device."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from accel_state.device_kinds import available_kind
from accel_state.environ import read
from accel_state.topology import DEFAULT_PORT


def get_backend() -> tuple[str, int, Callable[[], int]]:
    """Return the device type of this host, its number of devices, and a function for allocated memory.

    Example:
        >>> device_type, count, allocated = get_backend()
        >>> count >= 1, allocated() >= 0
        (True, True)
    """
    kind = available_kind()
    count = getattr(kind.module, "device_count", None)
    allocated = getattr(kind.module, "memory_allocated", None)
    if kind.type == "mps":
        allocated = torch.mps.current_allocated_memory
    return kind.type, count() if count is not None else 1, allocated or int


class SubprocessCallException(Exception):  # noqa: N818 - the name in Accelerate
    """A command of `run_command` has failed."""


def run_command(
    command: Sequence[Any], return_stdout: bool = False, env: Mapping[str, str] | None = None
) -> str | None:
    """Run a command, wait for it, and return its output if requested.

    Raises:
        SubprocessCallException: It failed; the message contains its output.
    """
    words = [str(word) for word in command]
    done = subprocess.run(
        words, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode:
        raise SubprocessCallException(
            f"Command `{' '.join(words)}` failed with the following error:\n\n{done.stdout}"
        )
    return done.stdout if return_stdout else None


@dataclass
class _RunOutput:
    """The result of a program: its return code, and the lines that it printed."""

    returncode: int | None
    stdout: list[str]
    stderr: list[str]


def execute_subprocess_async(
    cmd: Sequence[str],
    env: Mapping[str, str] | None = None,
    stdin: Any = None,
    timeout: float | None = 180,
    quiet: bool = False,
    echo: bool = True,
) -> _RunOutput:
    """Run a command, forward its output as it appears, and wait for its end.

    Args:
        cmd: The command line, as a list.
        env: Its environment; that of this process if None.
        stdin: As for `subprocess.Popen`.
        timeout: Seconds to wait for the end of its output, once it has ended.
        quiet: Whether to suppress its output.
        echo: Whether the command is printed.

    Raises:
        RuntimeError: It failed; the message contains its standard error.
    """
    if echo:
        sys.stdout.write(f"\nRunning:  {' '.join(cmd)}\n")
    lines: dict[str, list[str]] = {"stdout": [], "stderr": []}

    def forward(name: str, stream: Any) -> None:
        with stream:
            for line in stream:
                lines[name].append(line.rstrip())
                if not quiet:
                    getattr(sys, name).write(f"{name}: {lines[name][-1]}\n")

    pipe = subprocess.PIPE
    process = subprocess.Popen(
        cmd, env=env, stdin=stdin, stdout=pipe, stderr=pipe, text=True, errors="replace"
    )
    readers = [
        threading.Thread(target=forward, args=(name, getattr(process, name)), daemon=True) for name in lines
    ]
    for reader in readers:
        reader.start()
    returncode = process.wait()
    for reader in readers:
        reader.join(timeout)
    if returncode:
        raise RuntimeError(
            f"'{' '.join(cmd)}' failed with returncode {returncode}\n\n"
            f"The combined stderr from workers follows:\n" + "\n".join(lines["stderr"])
        )
    return _RunOutput(returncode, lines["stdout"], lines["stderr"])


def get_torch_dist_unique_port() -> int:
    """Return a port that no other pytest-xdist worker uses: 29500 plus the index of this worker."""
    return DEFAULT_PORT + int(read().get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
