"""Forked workers under torch's elastic launcher, and the state that does not survive a fork."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import pickle
import re
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage] - documented
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from accel_state import environ
from accel_state.accelerator_state import AcceleratorState, GradientState
from accel_state.device_kinds import KINDS
from accel_state.errors import AccelError, SettingsError, UnsupportedError
from accel_state.files import read_json
from accel_state.topology import detect

if sys.platform != "win32":  # which cannot fork
    import fcntl
    import termios


_FORK_TIMEOUT = 20.0  # seconds that a process waits until the last of its siblings is forked
# Variables that torch's launcher leaves behind in this process, with its own defaults.
_SET_BY_TORCH = {"torchelastic_signals_to_handle": "SIGTERM,SIGINT,SIGHUP,SIGQUIT"}
_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
# The frames around a function: a line that names one of these files, and the lines below it.
_OURS = re.compile(
    r'  File "[^"]*(?:(?:accel_train/(?:forking|launching)|errors/__init__)\.py|<frozen runpy>)", .*\n'
    r"(?:    .*\n)*"
)
_TORCHS_LOG = logging.getLogger("torch.distributed.elastic.multiprocessing.api")


class WorkerFailedError(AccelError, RuntimeError):
    """A process that a launcher started has failed. The message has the rank and the traceback of each.

    Args:
        message: What happened.
        ranks: The ranks that failed, the first one to fail first.
    """

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


def launch_config(
    processes: int,
    *,
    num_nodes: int = 1,
    node_rank: int = 0,
    rdzv_backend: str = "static",
    rdzv_conf: Mapping[str, Any] | None = None,
    **options: Any,
) -> LaunchConfig:
    """Return the configuration of torch's launcher, of which `options` are further fields."""
    # What a machine needs to know about itself; the second is only guessed from host names otherwise.
    own: Mapping[str, dict[str, Any]] = {
        "static": {"rank": node_rank},
        "c10d": {"is_host": node_rank == 0},
    }
    rest: dict[str, Any] = {"max_restarts": 0, "run_id": "none", **options}
    return LaunchConfig(
        min_nodes=num_nodes,
        max_nodes=num_nodes,
        nproc_per_node=processes,
        rdzv_backend=rdzv_backend,
        rdzv_configs={**own.get(rdzv_backend, {}), **(rdzv_conf or {})},
        start_method="fork",
        **rest,
    )


@contextlib.contextmanager
def reserve_port(port: int, option: str, *, or_any: bool = False) -> Generator[int]:
    """Listen on the port of torch's launcher, so that no other process takes it until the launcher does.

    The launcher's own store, made in this process for the same port, shares what listens here. Port 0 stands
    for any free one, which is taken with `or_any` also where another process listens; `option` is the name of
    the port for messages. Yields the port.
    """
    try:
        server = _server(port)
    except (OSError, OverflowError) as error:
        if not or_any:
            raise SettingsError(
                f"{option}={port}: this process cannot listen there ({error}); choose another port, or on "
                "one machine 0 for any that is free."
            ) from None
        server = _server(0)
    port = server.getsockname()[1]
    store = TCPStore(
        "127.0.0.1",
        port,
        is_master=True,
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=server.detach(),
    )
    try:
        yield port
    finally:
        del store


def _server(port: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


class ForkBarrier:
    """Gate that holds forked processes until all of them are forked.

    A thread of the parent keeps the store that they connect to. Locks that it holds during a fork, such as
    that of the name resolver, stay locked in the child for ever; so no process connects while others are
    forked.
    """

    __slots__ = ("_arrived", "_count", "_seen")

    def __init__(self, count: int) -> None:
        self._count = count
        self._seen, self._arrived = os.pipe()

    def wait(self, earlier: int = 0) -> None:
        """Wait until all processes are here, or until a timeout, since one may have died."""
        os.write(self._arrived, b".")
        expected, deadline = self._count * (earlier + 1), time.monotonic() + _FORK_TIMEOUT
        while _waiting_bytes(self._seen) < expected and time.monotonic() < deadline:
            time.sleep(0.002)

    def close(self) -> None:
        """Close the pipe."""
        os.close(self._seen)
        os.close(self._arrived)


def launch_forked(function: Callable[..., Any], args: Sequence[Any], config: LaunchConfig) -> dict[int, Any]:
    """Run a function in forked processes.

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
    if not callable(function):
        raise SettingsError(f"{function!r} is no function; `accel.launch` runs scripts, too.")
    if isinstance(args, str) or not isinstance(args, Sequence):
        raise SettingsError(f"args={args!r}: expected all that the function is called with, as a tuple.")
    if torch.distributed.is_initialized() or detect(environ.read()).world_size > 1:
        raise SettingsError(
            "This process is one of several already; a launcher starts processes from a single one."
        )
    gate = ForkBarrier(config.nproc_per_node)
    entry: Any = partial(_run_after_barrier, gate, _handlers(), function)
    # torch asks for both.
    entry.__name__ = entry.__qualname__ = getattr(function, "__name__", type(function).__name__)
    try:
        with (
            contextlib.closing(gate),
            _restore_process_state(config),
            environ.patch_environment(**_SET_BY_TORCH),
        ):
            results = _launched(config, entry, args)
    except SignalException as error:
        signal.raise_signal(error.sigval)  # now that the processes have ended, as if nobody had listened
        raise
    return dict(sorted(results.items()))


def _launched(config: LaunchConfig, entry: Callable[..., Any], args: Sequence[Any]) -> dict[int, Any]:
    try:
        return elastic_launch(config, entry)(*args)
    except ChildFailedError as error:
        folder = config.logs_specs.root_log_dir if config.logs_specs is not None else os.devnull
        stories = _failed_ranks(error.failures, Path(folder))
        raise WorkerFailedError("\n".join(stories.values()), [*stories]) from None


def _failed_ranks(failures: Mapping[int, ProcessFailure], folder: Path) -> dict[int, str]:
    """Describe the failures of processes of this node, by rank, in the order in which they failed.

    Torch reports one of them, which is any that it finds dead, with a time in whole seconds. Each process
    that raised has left an error file.
    """
    stories = {
        rank: (float(failure.timestamp), _describe_failure(rank, failure))
        for rank, failure in failures.items()
    }
    first = next(rank - failure.local_rank for rank, failure in failures.items())  # of this machine
    attempts = sorted(folder.glob("*/attempt_*"), key=lambda path: int(path.name.rpartition("_")[2]))
    for file in attempts[-1].glob("*/error.json") if attempts else ():
        rank = first + int(file.parent.name)
        with contextlib.suppress(ValueError):  # one that was ended as it wrote
            error = read_json(file, error=ValueError)["message"]
            stories[rank] = file.stat().st_mtime, _describe_error(rank, error)
    return {rank: story for rank, (_, story) in sorted(stories.items(), key=lambda item: item[1][0])}


def _describe_failure(rank: int, failure: ProcessFailure) -> str:
    """Describe a failed process."""
    stories: Any = failure.message
    if isinstance(stories, dict):
        return _describe_error(rank, stories)
    if failure.exitcode < 0:  # it was killed, and could not write down anything
        return f"Rank {rank} failed: {stories}"
    return f"Rank {rank} failed: it ended with exit code {failure.exitcode}."


def _describe_error(rank: int, error: Any) -> str:
    """Describe a process by its error file."""
    return f"Rank {rank} failed: {error['message']}\n{_OURS.sub('', error['extraInfo']['py_callstack'])}"


@contextlib.contextmanager
def _restore_process_state(config: LaunchConfig) -> Generator[None]:
    """Undo what torch's launcher does to this process, and does not undo."""
    handlers = _handlers()
    _TORCHS_LOG.addFilter(_drops_traceback)
    try:
        yield
    finally:
        _TORCHS_LOG.removeFilter(_drops_traceback)
        _restore(handlers)
        if config.logs_specs is not None:
            shutil.rmtree(config.logs_specs.root_log_dir, ignore_errors=True)


def _drops_traceback(record: logging.LogRecord) -> bool:
    """Whether a message of torch says more than the error."""
    return record.exc_info is None


def _handlers() -> dict[signal.Signals, Any]:
    """The handlers of the signals that torch's launcher listens to; none in a thread, where it does not."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    numbers = [signal.Signals[name] for name in _SIGNALS if name in signal.Signals.__members__]
    return {number: signal.getsignal(number) for number in numbers}


def _restore(handlers: Mapping[signal.Signals, Any]) -> None:
    for number, handler in handlers.items():
        if handler is not None:  # of C
            signal.signal(number, handler)


def run_forked(function: Callable[..., Any], *args: Any) -> Any:
    """Run a function in a process that has inherited the memory of another, with its states.

    It computes with one thread, as data workers do: OpenMP's threads were not copied, and if the other
    process has had any, the first operation with several would wait for them forever.
    """
    torch.set_num_threads(1)
    gc.freeze()  # to collect a process group of the parent is a crash: its threads were not copied
    AcceleratorState._reset_state(reset_partial_state=True)  # pyright: ignore[reportPrivateUsage] - the documented way
    GradientState._reset_state()  # pyright: ignore[reportPrivateUsage] - the documented way
    environ.publish({"FORK_LAUNCHED": "1"})
    return function(*args)


class _Pickled:
    """A result that is pickled already."""

    def __init__(self, result: Any) -> None:
        try:
            self._data = bytes(ForkingPickler.dumps(result))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise TypeError(
                f"The function has returned {result!r:.200}, which cannot be pickled to be handed to "
                f"the process that has launched it: {error}"
            ) from None

    def __reduce__(self) -> tuple[Callable[[bytes], Any], tuple[bytes]]:
        return pickle.loads, (self._data,)


def _run_after_barrier(
    gate: ForkBarrier, handlers: Mapping[signal.Signals, Any], function: Callable[..., Any], *args: Any
) -> Any:
    """Run as `run_forked` does, once all siblings are forked."""
    # Ctrl-C is for the launcher, which hands it on; twice it would break off a clean-up.
    os.setpgrp()
    heard: list[int] = []
    _restore(
        {
            number: partial(_record_signal, heard, old) if callable(old) else old
            for number, old in handlers.items()
        }
    )
    gate.wait(int(environ.read().get("TORCHELASTIC_RESTART_COUNT", "0")))
    result = run_forked(function, *args)
    if heard:  # and nobody waits for results any more
        sys.exit(128 + heard[0])
    return _Pickled(result)


def _record_signal(heard: list[int], handler: Callable[..., Any], number: int, frame: Any) -> None:
    """Record a signal, then handle it as before."""
    heard.append(number)
    handler(number, frame)


def _waiting_bytes(pipe: int) -> int:
    """Return the number of bytes that can be read from a pipe, without reading them."""
    return int.from_bytes(fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)), sys.byteorder)


def refuse_initialised_devices() -> None:
    """Refuse to fork if this process has initialised a device, which forked processes could not use."""
    found = next(
        (
            kind.name
            for kind in KINDS
            if kind.type != "cpu" and getattr(kind.module, "is_initialized", bool)()
        ),
        None,
    )
    if found is None and not _holds_cuda_driver():
        return
    raise SettingsError(
        f"This process has initialised {found or 'CUDA'}, and processes that it forks cannot. Restart the "
        "notebook, make the `Accelerator`, models and tensors on devices within the launched function only, "
        "and import libraries that touch the device there, too."
    )


def _holds_cuda_driver() -> bool:
    """Whether any library of this process uses CUDA, also without torch."""
    opened = Path("/proc/self/fd")  # Linux
    if not opened.is_dir():
        return False
    return any(_target(entry) == "/dev/nvidia-uvm" for entry in opened.iterdir())


def _target(link: Path) -> str:
    try:
        return str(link.readlink())
    except OSError:  # closed meanwhile
        return ""
