"""Forked processes that torch's elastic launcher looks after, and what a fork cannot take along."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from accel_state import environ
from accel_state.accelerator_state import AcceleratorState
from accel_state.devices.kinds import KINDS
from accel_state.errors import AccelError, SettingsError, UnsupportedError
from accel_state.gradient_state import GradientState
from accel_state.topology import detect

if sys.platform != "win32":  # which cannot fork
    import fcntl
    import termios

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

_PATIENCE = 20.0  # seconds that a process waits for the last of its siblings to be forked
# Variables that torch's launcher leaves behind in this process, with its own defaults.
_SET_BY_TORCH = {"torchelastic_signals_to_handle": "SIGTERM,SIGINT,SIGHUP,SIGQUIT"}


class WorkerFailedError(AccelError, RuntimeError):
    """A process that a launcher started has failed. The message has the rank and the traceback of each.

    Args:
        message: What happened.
        ranks: The ranks that failed, the first one to fail first.
    """

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machines:
    """The machines of a job, and how they find each other.

    Args:
        endpoint: Where they meet, `<address>:<port>`.
        num_nodes: How many there are.
        node_rank: Which one this is.
        backend: The rendezvous of torch that they use.
        conf: Its further options.
        run_id: What they, and no others, call the job.
    """

    endpoint: str
    num_nodes: int = 1
    node_rank: int = 0
    backend: str = "static"
    conf: Mapping[str, Any] = field(default_factory=dict[str, Any])
    run_id: str = "none"

    def config(self, processes: int, **options: Any) -> LaunchConfig:
        """What torch's launcher is asked for.

        Args:
            processes: Of each machine.
            **options: Further fields.
        """
        # What a machine needs to know about itself; the second is only guessed from host names otherwise.
        own: Mapping[str, dict[str, Any]] = {
            "static": {"rank": self.node_rank},
            "c10d": {"is_host": self.node_rank == 0},
        }
        rest: dict[str, Any] = {"max_restarts": 0, **options}
        return LaunchConfig(
            min_nodes=self.num_nodes,
            max_nodes=self.num_nodes,
            nproc_per_node=processes,
            run_id=self.run_id,
            rdzv_endpoint=self.endpoint,
            rdzv_backend=self.backend,
            rdzv_configs={**own.get(self.backend, {}), **self.conf},
            start_method="fork",
            **rest,
        )


class Gate:
    """Holds forked processes back until all of them are there.

    A thread of the parent keeps the store that they connect to. What it has locked when it is forked, the
    resolver of names for one, stays locked in the child for ever; so nobody connects while others are forked.

    Args:
        count: How many processes there will be.
    """

    __slots__ = ("_arrived", "_count", "_seen")

    def __init__(self, count: int) -> None:
        self._count = count
        self._seen, self._arrived = os.pipe()

    def wait(self, earlier: int = 0) -> None:
        """Return when all have come here, or after a while: one that has died must not hold up the others.

        Args:
            earlier: How many times all of them have been started before.
        """
        os.write(self._arrived, b".")
        everybody, deadline = self._count * (earlier + 1), time.monotonic() + _PATIENCE
        while _waiting_bytes(self._seen) < everybody and time.monotonic() < deadline:
            time.sleep(0.002)

    def close(self) -> None:
        """Give the pipe back."""
        os.close(self._seen)
        os.close(self._arrived)


def launch(function: Callable[..., Any], args: Sequence[Any], config: LaunchConfig) -> dict[int, Any]:
    """Run a function in forked processes.

    Args:
        function: What to run.
        args: What it is called with.
        config: How many processes, and so on.

    Returns:
        The results of this machine's processes by rank.

    Raises:
        WorkerFailedError: The function failed.
        SettingsError: This process is one of several already.
        UnsupportedError: This system cannot fork.
    """
    if sys.platform == "win32":
        raise UnsupportedError(
            "Windows cannot fork, and a function of a notebook cannot be sent to a new process. Write it to "
            "a file and start that with `accel launch`."
        )
    if torch.distributed.is_initialized() or detect(environ.read()).world_size > 1:
        raise SettingsError(
            "This process is one of several already; a launcher starts processes from a single one."
        )
    gate = Gate(config.nproc_per_node)
    entry: Any = partial(_run_behind, gate, function)
    # torch asks for both.
    entry.__name__ = entry.__qualname__ = getattr(function, "__name__", type(function).__name__)
    try:
        with contextlib.closing(gate), environ.patch_environment(**_SET_BY_TORCH):
            results = elastic_launch(config, entry)(*args)
    except ChildFailedError as error:
        failures = sorted(error.failures.items(), key=lambda item: item[1].timestamp)
        told = "\n".join(_story(rank, failure) for rank, failure in failures)
        raise WorkerFailedError(told, [rank for rank, _ in failures]) from None
    return dict(sorted(results.items()))


def run_forked(function: Callable[..., Any], *args: Any) -> Any:
    """Run a function in a process that has inherited the memory of another, with its states.

    Args:
        function: What to run.
        *args: What it is called with.
    """
    AcceleratorState._reset_state(reset_partial_state=True)  # pyright: ignore[reportPrivateUsage] - the documented way
    GradientState._reset_state()  # pyright: ignore[reportPrivateUsage] - the documented way
    environ.publish({"FORK_LAUNCHED": "1"})
    return function(*args)


def _run_behind(gate: Gate, function: Callable[..., Any], *args: Any) -> Any:
    """As `run_forked`, once all siblings are there."""
    gate.wait(int(environ.read().get("TORCHELASTIC_RESTART_COUNT", "0")))
    return run_forked(function, *args)


def _waiting_bytes(pipe: int) -> int:
    """How many bytes can be read from a pipe; they stay there."""
    return int.from_bytes(fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)), sys.byteorder)


def refuse_initialised_devices() -> None:
    """Raise if forked processes could not use their devices, because this one has touched its own.

    Raises:
        SettingsError: That is so.
    """
    found = next((kind.name for kind in KINDS if kind.type != "cpu" and _is_initialised(kind.module)), None)
    if found is None and not _holds_cuda_driver():
        return
    raise SettingsError(
        f"This process has initialised {found or 'CUDA'}, and processes that it forks cannot. Restart the "
        "notebook, make the `Accelerator`, models and tensors on devices within the launched function only, "
        "and import libraries that touch the device there, too."
    )


def _is_initialised(module: Any) -> bool:
    ask = getattr(module, "is_initialized", None)
    return ask is not None and bool(ask())


def _holds_cuda_driver() -> bool:
    """Whether any library of this process has CUDA in use, also one that torch knows nothing of."""
    opened = Path("/proc/self/fd")  # Linux
    if not opened.is_dir():
        return False
    return any(_target(entry) == "/dev/nvidia-uvm" for entry in opened.iterdir())


def _target(link: Path) -> str:
    try:
        return str(link.readlink())
    except OSError:  # closed meanwhile
        return ""


def _story(rank: int, failure: ProcessFailure) -> str:
    """What is known about a failed process."""
    told: Any = failure.message
    if not isinstance(told, dict):  # it was killed, and could not write down anything
        return f"Rank {rank} failed: {told}"
    return f"Rank {rank} failed: {told['message']}\n{told['extraInfo']['py_callstack']}"
