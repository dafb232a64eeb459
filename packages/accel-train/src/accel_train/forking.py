"""Fork workers under torch's elastic launcher, and repair what does not survive a fork."""

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
from torch.distributed import TCPStore
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from accel_state import environ
from accel_state.accelerator_state import AcceleratorState, GradientState
from accel_state.device_kinds import KINDS, available_kind
from accel_state.errors import AccelError, SettingsError, UnsupportedError
from accel_state.files import read_json
from accel_state.topology import detect
from accel_train.worker_errors import find_error_files

if sys.platform != "win32":  # Windows cannot fork
    import fcntl
    import termios


class WorkerFailedError(AccelError, RuntimeError):
    """Launched processes have failed. The message has the rank and traceback of each.

    Args:
        message: What happened.
        ranks: The ranks that failed, the first one to fail first.
    """

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


def launch_forked(function: Callable[..., Any], args: Sequence[Any], config: LaunchConfig) -> dict[int, Any]:
    """Run a function in forked processes.

    Returns:
        The results of this machine's processes by rank.

    Raises:
        WorkerFailedError: The function failed.
        SettingsError: This process is already one of several.
        UnsupportedError: This system cannot fork.
    """
    if sys.platform == "win32":
        raise UnsupportedError(
            "Windows cannot fork, and a notebook function cannot be sent to a new process. Write it to "
            "a file and start the file with"
            " `accel launch`."
        )
    if not callable(function):
        raise SettingsError(f"{function!r} is not a function. `accel.launch` also runs scripts.")
    if isinstance(args, str) or not isinstance(args, Sequence):
        raise SettingsError(f"args={args!r}: expected the arguments of the function as a tuple.")
    if torch.distributed.is_initialized() or detect(environ.read()).world_size > 1:
        raise SettingsError(
            "This process is already one of several. A launcher starts processes from a single process."
        )
    barrier = ForkBarrier(config.nproc_per_node)
    entry: Any = partial(_run_after_barrier, barrier, _signal_handlers(), function)
    # torch's launcher reads both names of its entry point.
    entry.__name__ = entry.__qualname__ = getattr(function, "__name__", type(function).__name__)
    try:
        with (
            contextlib.closing(barrier),
            _restore_process_state(config),
            environ.patch_environment(**_SET_BY_TORCH),
        ):
            results = _launch(config, entry, args)
    except SignalException as error:
        signal.raise_signal(error.sigval)  # the processes have ended, and the handlers are restored
        raise
    return dict(sorted(results.items()))


# A variable that torch's launcher sets in this process and leaves there, with torch's default.
_SET_BY_TORCH = {"torchelastic_signals_to_handle": "SIGTERM,SIGINT,SIGHUP,SIGQUIT"}


def _launch(config: LaunchConfig, entry: Callable[..., Any], args: Sequence[Any]) -> dict[int, Any]:
    try:
        return elastic_launch(config, entry)(*args)
    except ChildFailedError as error:
        folder = config.logs_specs.root_log_dir if config.logs_specs is not None else os.devnull
        messages = _describe_failures(error.failures, Path(folder))
        raise WorkerFailedError("\n".join(messages.values()), [*messages]) from None


def _describe_failures(failures: Mapping[int, ProcessFailure], folder: Path) -> dict[int, str]:
    """Describe the failed processes of this node, by rank, in the order in which they failed.

    Torch reports one of them, not always the first, with a time in whole seconds. Each process that raised
    an exception has written an error file.
    """
    messages: dict[int, tuple[float, str]] = {}
    for rank, failure in failures.items():
        content: Any = failure.message
        if isinstance(content, dict):
            message = _describe_error(rank, content)
        elif failure.exitcode < 0:  # a killed process writes no error file, and torch names the signal
            message = f"Rank {rank} failed: {content}"
        else:
            message = f"Rank {rank} failed: it exited with code {failure.exitcode}."
        messages[rank] = float(failure.timestamp), message
    first_rank = next(rank - failure.local_rank for rank, failure in failures.items())  # of this node
    for file in find_error_files(folder):
        rank = first_rank + int(file.parent.name)
        with contextlib.suppress(ValueError):  # the process was killed as it wrote the file
            content = read_json(file)["message"]
            messages[rank] = file.stat().st_mtime, _describe_error(rank, content)
    return {rank: message for rank, (_, message) in sorted(messages.items(), key=lambda item: item[1][0])}


# The frames around the launched function: a line that names one of these files, and the lines below it.
_OUTER_FRAMES = re.compile(
    r'  File "[^"]*(?:(?:accel_train/(?:forking|launching)|errors/__init__)\.py|<frozen runpy>)", .*\n'
    r"(?:    .*\n)*"
)


def _describe_error(rank: int, content: Any) -> str:
    """Describe the failure of a process from its error file."""
    trace = _OUTER_FRAMES.sub("", content["extraInfo"]["py_callstack"])
    return f"Rank {rank} failed: {content['message']}\n{trace}"


_TORCHS_LOG = logging.getLogger("torch.distributed.elastic.multiprocessing.api")


@contextlib.contextmanager
def _restore_process_state(config: LaunchConfig) -> Generator[None]:
    """Restore signal handlers and remove the log folder after torch's launcher, which does neither."""
    handlers = _signal_handlers()
    _TORCHS_LOG.addFilter(_has_no_traceback)
    try:
        yield
    finally:
        _TORCHS_LOG.removeFilter(_has_no_traceback)
        _set_handlers(handlers)
        if config.logs_specs is not None:
            shutil.rmtree(config.logs_specs.root_log_dir, ignore_errors=True)


def _has_no_traceback(record: logging.LogRecord) -> bool:
    """Return whether a log record of torch has no traceback (the raised error already contains it)."""
    return record.exc_info is None


_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")


def _signal_handlers() -> dict[signal.Signals, Any]:
    """Return the handlers of the signals that torch's launcher handles; none outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    numbers = [signal.Signals[name] for name in _SIGNALS if name in signal.Signals.__members__]
    return {number: signal.getsignal(number) for number in numbers}


def _set_handlers(handlers: Mapping[signal.Signals, Any]) -> None:
    for number, handler in handlers.items():
        if handler is not None:  # a handler that C installed is None and cannot be restored
            signal.signal(number, handler)


def _run_after_barrier(
    barrier: ForkBarrier,
    handlers: Mapping[signal.Signals, Any],
    function: Callable[..., Any],
    *args: Any,
) -> Any:
    """Run a function as `run_forked` does, once all siblings are forked."""
    # The launcher forwards Ctrl-C; a second one from the terminal would interrupt the clean-up.
    os.setpgrp()
    received: list[int] = []

    def record(handler: Callable[..., Any], number: int, frame: Any) -> None:
        received.append(number)
        handler(number, frame)

    _set_handlers(
        {number: partial(record, old) if callable(old) else old for number, old in handlers.items()}
    )
    barrier.wait(int(environ.read().get("TORCHELASTIC_RESTART_COUNT", "0")))
    result = run_forked(function, *args)
    if received:  # the launcher no longer waits for a result
        sys.exit(128 + received[0])
    return _Pickled(result)


_FORK_TIMEOUT = 20.0  # seconds that a process waits for its siblings to be forked


class ForkBarrier:
    """Barrier of forked processes, which opens when all of them are forked.

    A thread of the parent serves the store that they connect to. Locks that this thread holds during a fork,
    such as the name resolver's, stay locked in the child forever; so no process connects while its
    siblings are being forked.
    """

    __slots__ = ("_count", "_read_end", "_timeout", "_write_end")

    def __init__(self, count: int, *, timeout: float = _FORK_TIMEOUT) -> None:
        self._count = count
        self._timeout = timeout
        self._read_end, self._write_end = os.pipe()

    def wait(self, earlier: int = 0) -> None:
        """Wait until all processes have arrived, or until a timeout, since a process may have died."""
        os.write(self._write_end, b".")
        expected, deadline = self._count * (earlier + 1), time.monotonic() + self._timeout
        while _waiting_bytes(self._read_end) < expected and time.monotonic() < deadline:
            time.sleep(0.002)

    def close(self) -> None:
        """Close the pipe."""
        os.close(self._read_end)
        os.close(self._write_end)


def _waiting_bytes(pipe: int) -> int:
    """Return the number of bytes that can be read from a pipe, without reading them."""
    return int.from_bytes(fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)), sys.byteorder)


def run_forked(function: Callable[..., Any], *args: Any) -> Any:
    """Run a function in a forked process, after resetting the states inherited from the parent.

    It computes with one thread, as data workers do: a fork does not copy OpenMP's threads, and if the parent
    has had any, the first multi-threaded operation would wait for them forever.
    """
    torch.set_num_threads(1)
    gc.freeze()  # collecting a process group of the parent would crash: its threads were not copied
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    environ.publish({"FORK_LAUNCHED": "1"})
    return function(*args)


class _Pickled:
    """A result that is pickled in the worker, so that a pickling error can name it."""

    def __init__(self, result: Any) -> None:
        try:
            self._data = bytes(ForkingPickler.dumps(result))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise TypeError(
                f"The function returned {result!r:.200}, which cannot be pickled and returned to the "
                "launching process:"
                f" {error}"
            ) from None

    def __reduce__(self) -> tuple[Callable[[bytes], Any], tuple[bytes]]:
        return pickle.loads, (self._data,)


def launch_config(
    processes: int,
    *,
    num_nodes: int = 1,
    node_rank: int = 0,
    rdzv_backend: str = "static",
    rdzv_conf: Mapping[str, Any] | None = None,
    **options: Any,
) -> LaunchConfig:
    """Return the configuration of torch's launcher; `options` are further fields of it."""
    # Without `is_host`, the c10d rendezvous guesses from host names which node hosts the store.
    node_options: Mapping[str, dict[str, Any]] = {
        "static": {"rank": node_rank},
        "c10d": {"is_host": node_rank == 0},
    }
    options = {"max_restarts": 0, "run_id": "none", **options}
    return LaunchConfig(
        min_nodes=num_nodes,
        max_nodes=num_nodes,
        nproc_per_node=processes,
        rdzv_backend=rdzv_backend,
        rdzv_configs={**node_options.get(rdzv_backend, {}), **(rdzv_conf or {})},
        start_method="fork",
        **options,
    )


@contextlib.contextmanager
def reserve_port(port: int, option: str, *, or_any: bool = False) -> Generator[int]:
    """Listen on the port of torch's launcher before the launcher does, and yield the port.

    The launcher's own store, created in this process for the same port, shares this store's socket. Port 0
    is any free port; with `or_any`, a free port also replaces one that is in use. Messages name the port
    by `option`.
    """
    try:
        server = _listen(port)
    except (OSError, OverflowError) as error:
        if not or_any:
            raise SettingsError(
                f"{option}={port}: cannot listen on this port ({error}). Choose another port, or 0 for "
                "any free port (on one machine)."
            ) from None
        server = _listen(0)
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


def _listen(port: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def refuse_initialised_devices() -> None:
    """Refuse to fork if this process has initialised a device, which forked processes could not use."""
    devices = [kind for kind in (*KINDS, available_kind()) if kind.type != "cpu"]
    names = [kind.name for kind in devices if getattr(kind.module, "is_initialized", bool)()]
    if not names and _holds_cuda_driver():  # a library other than torch has opened it
        names = ["CUDA"]
    if not names:
        return
    raise SettingsError(
        f"This process has initialised {names[0]}, so forked processes cannot use it. Restart the "
        "notebook. Create the `Accelerator`, models and device tensors only within the launched "
        "function, and import libraries that use the device there."
    )


def _holds_cuda_driver() -> bool:
    """Return whether any library of this process has opened the CUDA driver."""
    opened = Path("/proc/self/fd")  # on Linux only
    if not opened.is_dir():
        return False
    return any(_read_link(entry) == "/dev/nvidia-uvm" for entry in opened.iterdir())


def _read_link(link: Path) -> str:
    try:
        return str(link.readlink())
    except OSError:  # the descriptor was closed meanwhile
        return ""
