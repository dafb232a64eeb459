"""Run programs in other processes from tests, and clean up between tests.

They are imported as `accelerate.test_utils`.
"""

from __future__ import annotations

import asyncio
import io
import shutil
import subprocess
import sys
import tempfile
import unittest
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import torch

from accel_ops.collectives import gather
from accel_state.accelerator_state import AcceleratorState
from accel_state.environ import read
from accel_state.partial_state import PartialState
from accel_train.testing.requirements import device_count


def get_launch_command(**kwargs: Any) -> list[str]:
    """Return the command line of `accelerate launch`, up to the script.

    Args:
        kwargs: Values by flag without dashes; True for a flag without a value, None to omit it.

    Example:
        >>> get_launch_command(num_processes=2, cpu=True)[1:]
        ['launch', '--num_processes=2', '--cpu']
    """
    flags = (
        f"--{name}" if value is True else f"--{name}={value}"
        for name, value in kwargs.items()
        if value is not None
    )
    return ["accelerate" if shutil.which("accelerate") else "accel", "launch", *flags]


def print_devices() -> None:
    """Print the number of accelerators of this host: the smallest program for a test of a launcher."""
    sys.stdout.write(f"Successfully ran on {device_count} accelerators\n")


DEFAULT_LAUNCH_COMMAND = get_launch_command(num_processes=device_count, monitor_interval=0.1)


class SubprocessCallException(Exception):  # noqa: N818 - the documented name
    """A command of `run_command` has failed."""


def run_command(
    command: Sequence[Any], return_stdout: bool = False, env: Mapping[str, str] | None = None
) -> str | None:
    """Run a command and wait for it.

    Args:
        command: The command line, as a list.
        return_stdout: Whether to return its output.
        env: Its environment; that of this process if None.

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
        timeout: Seconds to wait for the end of its output; afterwards it waits only for the command itself.
        quiet: Whether to suppress its output.
        echo: Whether the command is printed.

    Returns:
        An object with `returncode`, and the lines `stdout` and `stderr`.

    Raises:
        RuntimeError: It failed; the message contains its standard error.
    """
    result = asyncio.run(_stream_subprocess(cmd, env, stdin, timeout, quiet, echo))
    if result.returncode:
        lines = "\n".join(result.stderr)
        raise RuntimeError(
            f"'{' '.join(cmd)}' failed with returncode {result.returncode}\n\n"
            f"The combined stderr from workers follows:\n{lines}"
        )
    return result


async def _stream_subprocess(
    cmd: Sequence[str],
    env: Mapping[str, str] | None = None,
    stdin: Any = None,
    timeout: float | None = None,
    quiet: bool = False,
    echo: bool = False,
) -> _RunOutput:
    if echo:
        sys.stdout.write(f"\nRunning:  {' '.join(cmd)}\n")
    process = await asyncio.create_subprocess_exec(
        *cmd,
        env=env,
        stdin=stdin,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        limit=2**24,
    )
    lines: dict[str, list[str]] = {"stdout": [], "stderr": []}

    def collector(name: str) -> Callable[[bytes], None]:
        def collect(line: bytes) -> None:
            text = line.decode(errors="replace").rstrip()
            lines[name].append(text)
            if not quiet:
                getattr(sys, name).write(f"{name}: {text}\n")

        return collect

    readers = [asyncio.create_task(_read_stream(getattr(process, name), collector(name))) for name in lines]
    await asyncio.wait(readers, timeout=timeout)
    returncode = await process.wait()  # readers run until then: a full pipe would block the command
    return _RunOutput(returncode, lines["stdout"], lines["stderr"])


async def _read_stream(stream: asyncio.StreamReader, callback: Callable[[bytes], None]) -> None:
    while line := await stream.readline():
        callback(line)


def capture_call_output(func: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """Call a function and return its printed output.

    Example:
        >>> capture_call_output(print, "a", end="z")
        'az'
    """
    with redirect_stdout(io.StringIO()) as output:
        func(*args, **kwargs)
    return output.getvalue()


@contextmanager
def assert_exception(exception_class: type[BaseException], msg: str | None = None) -> Generator[None]:
    """Assert that the block raises an exception of a class.

    Args:
        exception_class: The class, or a base class of it.
        msg: Text that its message must contain.

    Raises:
        AssertionError: The block raised nothing, another exception, or one with another message.

    Example:
        >>> with assert_exception(ValueError, "invalid literal"):
        ...     int("x")
    """
    try:
        yield
    except (Exception, exception_class) as error:
        if not isinstance(error, exception_class):
            message = f"Expected exception of type {exception_class} but got {type(error)}"
            raise AssertionError(message) from error
        if msg is not None and msg not in str(error):
            message = f"Expected message '{msg}' to be in exception but got '{error}'"
            raise AssertionError(message) from error
        return
    raise AssertionError(f"Expected exception of type {exception_class} but ran without issue.")


def are_the_same_tensors(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is the same on all ranks. All ranks must call it."""
    state = AcceleratorState()
    gathered: torch.Tensor = gather(tensor[None].clone().to(state.device)).cpu()
    return all(torch.equal(row, tensor.cpu()) for row in gathered)


def path_in_accelerate_package(*components: str) -> Path:
    """Return a path within the folder of the package `accel`.

    Raises:
        ModuleNotFoundError: It is not installed.
    """
    spec = find_spec("accel")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("accel is not installed: install accel-suite.", name="accel")
    return Path(spec.origin).parent.joinpath(*components)


def pytest_xdist_worker_id() -> int:
    """Return the index of this pytest-xdist worker; 0 without pytest-xdist."""
    return int(read().get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))


def get_torch_dist_unique_port() -> int:
    """Return a port that no other pytest-xdist worker uses: 29500 plus the index of this worker."""
    return 29500 + pytest_xdist_worker_id()


class TempDirTestCase(unittest.TestCase):
    """A test case with the folder `self.tmpdir`, emptied before each test and removed after the last.

    A class that sets `clear_on_setup = False` keeps the content between its tests.
    """

    clear_on_setup = True
    tmpdir: ClassVar[Path]

    @classmethod
    def setUpClass(cls) -> None:
        """Create the folder."""
        cls.tmpdir = Path(tempfile.mkdtemp())

    @classmethod
    def tearDownClass(cls) -> None:
        """Remove the folder."""
        shutil.rmtree(cls.tmpdir, ignore_errors=True)

    def setUp(self) -> None:
        """Empty the folder."""
        if self.clear_on_setup:
            for path in self.tmpdir.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()


class AccelerateTestCase(unittest.TestCase):
    """A test case that resets the states after each test."""

    def tearDown(self) -> None:
        """Reset `AcceleratorState` and `PartialState`."""
        super().tearDown()
        AcceleratorState._reset_state(reset_partial_state=True)
        PartialState._reset_state()


class MockingTestCase(unittest.TestCase):
    """A test case whose `setUp` adds patches that last for each of its tests."""

    def add_mocks(self, mocks: Any) -> None:
        """Start patches, and stop them after the test.

        Args:
            mocks: A patch of `unittest.mock`, or several.
        """
        self.mocks = mocks if isinstance(mocks, (tuple, list)) else [mocks]
        for patch in self.mocks:
            patch.start()
            self.addCleanup(patch.stop)
