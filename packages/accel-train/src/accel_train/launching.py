"""Launch from Python: functions by notebook_launcher and debug_launcher, scripts by launch."""

from __future__ import annotations

import contextlib
import json
import logging
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from multiprocessing.reduction import ForkingPickler
from os import PathLike, fspath
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, get_args

import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from accel_state import environ
from accel_state.accelerator_state import AcceleratorState, GradientState
from accel_state.device_kinds import CPU, KINDS, available_kind, peer_variables
from accel_state.errors import AccelError, SettingsError, UnsupportedError
from accel_state.labels import DistributedType
from accel_state.partial_state import PartialState
from accel_state.platforms import is_windows
from accel_state.settings import Settings, from_environ, merge_layers, parse_file, to_content, worker_environ
from accel_state.settings.model import OPTIONS, Precision, as_text, value_at
from accel_state.topology import DEFAULT_PORT, detect, is_port_in_use, reserved_port
from accel_train.worker_errors import ERROR_FILE, error_of_failure, read_worker_errors, worker_error


class WorkerFailedError(AccelError, RuntimeError):
    """Launched processes have failed. The message has the rank and traceback of each.

    Args:
        message: What happened.
        ranks: The ranks that failed, the first one to fail first.
    """

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


def notebook_launcher(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    num_processes: int | None = None,
    mixed_precision: str = "no",
    use_port: str | int = "29500",
    master_addr: str = "127.0.0.1",
    node_rank: int = 0,
    num_nodes: int = 1,
    rdzv_backend: str = "static",
    rdzv_endpoint: str = "",
    rdzv_conf: Mapping[str, Any] | None = None,
    rdzv_id: str = "none",
    max_restarts: int = 0,
    monitor_interval: float = 0.1,
    log_line_prefix_template: str | None = None,
) -> dict[int, Any]:
    """Run a training function on several devices from a notebook or any Python process.

    The function runs in forked processes, so that it may be defined in a notebook cell; one process on one
    machine is not forked but runs here. Make the `Accelerator`, and touch accelerators, in the function only.

    Args:
        function: The function to run. Its result must be picklable.
        args: Its arguments.
        num_processes: Number of processes on this machine. If `None`, one per accelerator, or one without
            accelerators. On TPUs, with 1 one process drives all chips, as sharding by the compiler (SPMD)
            requires. Otherwise there is one process per chip, and the rendezvous arguments are not used.
        mixed_precision: For `Accelerator`s that are not given one: `"fp16"` or `"bf16"`; `"no"` leaves it
            to the environment.
        use_port: The port of rank 0; 0 for any free port. On a single machine, the default is any free port.
        master_addr: The address of the first machine.
        node_rank: The rank of this machine.
        num_nodes: Number of machines that call this function.
        rdzv_backend: The rendezvous backend: `"static"` or `"c10d"`.
        rdzv_endpoint: The rendezvous endpoint; `<master_addr>:<use_port>` if empty.
        rdzv_conf: Further options of the rendezvous.
        rdzv_id: The id of this job, the same on all its nodes.
        max_restarts: How often all processes are restarted after a failure.
        monitor_interval: Seconds between two checks of the processes.
        log_line_prefix_template: If set, this process prints the output of the processes, each line with this
            prefix; `${rank}`, `${local_rank}` and `${role_name}` are replaced.

    Returns:
        The results of this machine's processes by rank.

    Raises:
        SettingsError: An argument is invalid, or a device is already initialised, which forked processes
            could not use.
        WorkerFailedError: The function failed in a forked process.
        UnsupportedError: This system cannot fork.

    Example:
        >>> notebook_launcher(lambda text: text.upper(), ("trained",), num_processes=1)
        {0: 'TRAINED'}
    """
    # 1. Check the arguments, and count the processes of this machine.
    if mixed_precision.lower() not in get_args(Precision):
        raise SettingsError(
            f"notebook_launcher: mixed_precision={mixed_precision!r} not in {get_args(Precision)}."
        )
    if not str(use_port).isdigit():
        raise SettingsError(f"notebook_launcher(use_port={use_port!r}): expected the number of a port.")
    kind = CPU if from_environ(environ.read()).process.use_cpu else available_kind()
    found = getattr(kind.module, "device_count", None)  # initialises no device
    count = num_processes
    if count is None:
        count = 1 if found is None else max(1, found())
    for name, value, least in (
        ("num_processes", count, 1),
        ("num_nodes", num_nodes, 1),
        ("max_restarts", max_restarts, 0),
    ):
        _check_count(name, value, least)
    if not 0 <= node_rank < num_nodes:
        raise SettingsError(f"node_rank={node_rank!r} is not one of num_nodes={num_nodes!r}, counted from 0.")
    variables = {} if mixed_precision.lower() == "no" else {"accelerate_mixed_precision": mixed_precision}
    plain = rdzv_backend == "static" and not (rdzv_endpoint or max_restarts or log_line_prefix_template)
    # 2. Without a fork: start processes by the device's own runtime, or run in this process.
    if kind.own_runtime is not None and num_processes != 1:
        _refuse_initialised_devices()
        with environ.patch_environment(**variables):
            return kind.own_runtime.run_on_each_device(function, args, num_processes)
    if plain and count == num_nodes == 1:
        with environ.patch_environment(**variables):
            return {0: function(*args)}
    # 3. Fork the processes.
    if kind.type != "cpu":
        _refuse_initialised_devices()
    if kind.name == "cuda":
        variables |= peer_variables(environ.read())
    port = 0 if num_nodes == 1 and int(use_port) == DEFAULT_PORT else int(use_port)
    if port == 0 and num_nodes > 1:
        raise SettingsError("use_port=0: several machines need a fixed port.")
    if port and node_rank == 0 and is_port_in_use(port):
        raise SettingsError(
            f"use_port={port}: another program uses this port. Choose another, or 0 for any free port (on "
            "one machine)."
        )
    with environ.patch_environment(**variables):
        return _fork(
            function,
            args,
            count,
            num_nodes=num_nodes,
            node_rank=node_rank,
            rdzv_backend=rdzv_backend,
            rdzv_conf=rdzv_conf,
            rdzv_endpoint=rdzv_endpoint or f"{master_addr}:{port or reserved_port()}",
            run_id=rdzv_id,
            max_restarts=max_restarts,
            monitor_interval=monitor_interval,
            log_line_prefix_template=log_line_prefix_template,
            logs_specs=DefaultLogsSpecs(tee=Std.NONE if log_line_prefix_template is None else Std.ALL),
        )


def debug_launcher(
    function: Callable[..., Any], args: Sequence[Any] = (), num_processes: int = 2
) -> dict[int, Any]:
    """Run a training function in several processes on the CPU, for tests and debugging.

    Args:
        function: The function to run. Its result must be picklable.
        args: Its arguments.
        num_processes: Number of processes.

    Returns:
        The results by rank.

    Raises:
        SettingsError: `num_processes` is invalid, or this process is already one of several.
        WorkerFailedError: The function failed.
        UnsupportedError: This system cannot fork.

    Example:
        >>> from accel_train import Accelerator
        >>> debug_launcher(lambda: Accelerator().process_index, num_processes=2)
        {0: 0, 1: 1}
    """
    _check_count("num_processes", num_processes, 1)
    with environ.patch_environment(accelerate_use_cpu="yes"):
        return _fork(function, args, num_processes, rdzv_endpoint=f"127.0.0.1:{reserved_port()}")


def _check_count(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise SettingsError(f"{name}={value!r}: expected a whole number of at least {least}.")


def launch(
    script: str | PathLike[str],
    args: Sequence[Any] = (),
    *,
    config: Settings | Mapping[str, Any] | None = None,
) -> None:
    """Run a script by the command `accel launch`, with settings from Python.

    Neither a config file nor the environment variables of settings are read: only `config` counts. Functions
    are run by `notebook_launcher`.

    Args:
        script: The path of a Python script; the name of a module with `launch.module`, an executable with
            `launch.no_python`.
        args: The words after the script.
        config: The settings, or the table of a config file; `Settings()` if None, which runs one process
            per accelerator.

    Raises:
        SettingsError: The settings are invalid.
        WorkerFailedError: The command has failed, after it has printed why.

    Example:
        >>> from accel_state.settings import LaunchSettings, ProcessSettings, Settings
        >>> two = Settings(process=ProcessSettings(use_cpu=True), launch=LaunchSettings(num_processes=2))
        >>> launch("train.py", ("--lr", 0.1), config=two)  # doctest: +SKIP
    """
    if callable(script):
        raise SettingsError(f"launch({script!r}) runs scripts: pass a function to notebook_launcher().")
    settings = config or Settings()
    if isinstance(settings, Mapping):
        settings = merge_layers(parse_file(settings, "launch(config=...)")).settings
    if not isinstance(settings, Settings):
        raise SettingsError(
            f"launch(config={config!r}): expected settings, or the table that a config file holds, such as "
            "`yaml.safe_load(open(config))`."
        )
    # A config file has no keys for these settings: the command takes them as flags, or from variables.
    flags, variables = list[str](), dict[str, str]()
    for option in OPTIONS:
        value = value_at(settings, option.path)
        if option.key is not None or "." not in option.path or value == value_at(Settings(), option.path):
            continue
        if option.name in {"aws_access_key_id", "aws_secret_access_key"}:  # no list of processes shows a key
            variables[option.name.upper()] = as_text(value)
        elif option.flags:
            flags.append(option.flags[-1] if value is True else f"{option.flags[-1]}={value}")
        elif option.variable is not None:
            variables[option.variable] = as_text(value)
    with TemporaryDirectory(prefix="accel-launch-") as folder:
        file = Path(folder) / "config.json"
        file.write_text(json.dumps(to_content(settings)), encoding="utf-8")
        line = [sys.executable, "-m", "accel_cli", "launch", f"--config_file={file}", *flags, fspath(script)]
        done = subprocess.run(
            line + [str(word) for word in args],
            env=worker_environ(Settings(), environ.read()) | variables,
            check=False,
        )
    if done.returncode:
        raise WorkerFailedError(f"`accel launch {script}` ended with exit code {done.returncode}.")


def _fork(
    function: Callable[..., Any],
    args: Sequence[Any],
    processes: int,
    *,
    num_nodes: int = 1,
    node_rank: int = 0,
    rdzv_backend: str = "static",
    rdzv_conf: Mapping[str, Any] | None = None,
    **options: Any,
) -> dict[int, Any]:
    """Run a function in forked processes under torch's elastic launcher; `options` are of its configuration.

    Returns:
        The results of this machine's processes by rank.
    """
    if is_windows():
        raise UnsupportedError(
            "Windows cannot fork, and a notebook function cannot be sent to a new process. Write it to "
            "a file and start the file with `accel launch`."
        )
    if not callable(function):
        raise SettingsError(f"{function!r} is not a function. `accel.launch` runs scripts.")
    if isinstance(args, str) or not isinstance(args, Sequence):
        raise SettingsError(f"args={args!r}: expected the arguments of the function as a tuple.")
    if torch.distributed.is_initialized() or detect(environ.read()).world_size > 1:
        raise SettingsError(
            "This process is already one of several. A launcher starts processes from a single process."
        )
    # Without `is_host`, the c10d rendezvous guesses from host names which node hosts the store.
    node_options: dict[str, dict[str, Any]] = {
        "static": {"rank": node_rank},
        "c10d": {"is_host": node_rank == 0},
    }
    options = {"max_restarts": 0, "run_id": "none", **options}
    logs = options["logs_specs"] = options.get("logs_specs") or DefaultLogsSpecs()  # makes a folder
    config = LaunchConfig(
        min_nodes=num_nodes,
        max_nodes=num_nodes,
        nproc_per_node=processes,
        rdzv_backend=rdzv_backend,
        rdzv_configs={**node_options.get(rdzv_backend, {}), **(rdzv_conf or {})},
        start_method="fork",
        **options,
    )
    # Torch's launcher leaves its signal handlers, a variable and a folder of logs.
    handlers = dict[signal.Signals, Any]()
    if threading.current_thread() is threading.main_thread():
        numbers = [signal.Signals[name] for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")]
        handlers = {number: signal.getsignal(number) for number in numbers}
    forked = multiprocessing.get_context("fork").Barrier(processes)
    entry: Any = partial(_run_as_rank, forked, handlers, function)
    entry.__name__ = entry.__qualname__ = getattr(function, "__name__", type(function).__name__)
    log = logging.getLogger("torch.distributed.elastic.multiprocessing.api")
    try:
        signals = getattr(config, "signals_to_handle", "SIGTERM,SIGINT,SIGHUP,SIGQUIT")  # since PyTorch 2.10
        with environ.patch_environment(torchelastic_signals_to_handle=signals):
            log.addFilter(_has_no_traceback)
            try:
                return dict(sorted(elastic_launch(config, entry)(*args).items()))
            except ChildFailedError as error:  # torch reports one failure
                failures: Mapping[int, Any] = error.failures
                errors = {rank: error_of_failure(failure) for rank, failure in failures.items()}
                errors |= read_worker_errors(Path(logs.root_log_dir))
                ranks = sorted(errors, key=lambda rank: errors[rank].time)
                text = "\n".join(f"Rank {rank} {errors[rank].how}\n{errors[rank].trace}" for rank in ranks)
                raise WorkerFailedError(text, ranks) from None
            finally:
                log.removeFilter(_has_no_traceback)
                _set_handlers(handlers)
                shutil.rmtree(logs.root_log_dir, ignore_errors=True)
    except SignalException as error:
        signal.raise_signal(error.sigval)  # the processes have ended, and the handlers are restored
        raise


def _has_no_traceback(record: logging.LogRecord) -> bool:
    """Return whether a log record of torch has no traceback (the raised error already contains it)."""
    return record.exc_info is None


def _set_handlers(handlers: Mapping[signal.Signals, Any]) -> None:
    for number, handler in handlers.items():
        if handler is not None:  # a handler that C installed is None and cannot be restored
            signal.signal(number, handler)


_FORK_TIMEOUT = 20.0  # seconds that a process waits for its siblings to be forked


def _run_as_rank(
    forked: Any,
    handlers: Mapping[signal.Signals, Any],
    function: Callable[..., Any],
    *args: Any,
) -> Any:
    """Run a function in a process that torch's launcher has forked, and write its error for the parent."""
    # The launcher forwards Ctrl-C; a second one from the terminal would interrupt the clean-up.
    os.setpgrp()
    received: list[int] = []

    def record(handler: Callable[..., Any], number: int, frame: Any) -> None:
        received.append(number)
        handler(number, frame)

    _set_handlers(
        {number: partial(record, old) if callable(old) else old for number, old in handlers.items()}
    )
    # A thread of the parent serves the store that ranks connect to. A lock that it holds during a fork, such
    # as the name resolver's, stays locked in the child: no rank connects before all are forked.
    with contextlib.suppress(threading.BrokenBarrierError):
        forked.wait(_FORK_TIMEOUT)
    try:
        result = _run_forked(function, *args)
        ForkingPickler.dumps(result)  # here an error has a traceback
    except Exception as error:  # noqa: BLE001 - the parent raises it
        variables = environ.read()
        trace = "".join(traceback.format_exception(error))
        content = worker_error(type(error).__name__, str(error), trace, int(variables["RANK"]), time.time())
        Path(variables[ERROR_FILE]).write_text(json.dumps(content), encoding="utf-8")
        sys.exit(1)
    if received:  # the launcher no longer waits for a result
        sys.exit(128 + received[0])
    return result


def _run_forked(function: Callable[..., Any], *args: Any) -> Any:
    """Run a function in a forked process, after resetting the states inherited from the parent.

    It computes with one thread, as data workers do: a fork does not copy OpenMP's threads, and if the parent
    has had any, the first multi-threaded operation would wait for them forever.
    """
    torch.set_num_threads(1)
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    environ.publish({"FORK_LAUNCHED": "1"})
    return function(*args)


def _refuse_initialised_devices() -> None:
    """Refuse to fork if this process has initialised a device, which forked processes could not use."""
    devices = [kind for kind in (*KINDS, available_kind()) if kind.type != "cpu"]
    names = [kind.name for kind in devices if getattr(kind.module, "is_initialized", bool)()]
    if not names and any(
        os.path.realpath(link) == "/dev/nvidia-uvm" for link in Path("/proc/self/fd").glob("*")
    ):
        names = ["CUDA"]  # a library other than torch has opened it
    if names:
        raise SettingsError(
            f"This process has initialised {names[0]}, so forked processes cannot use it. Restart the "
            "notebook. Create the `Accelerator`, models and device tensors only within the launched "
            "function, and import libraries that use the device there."
        )


class PrepareForLaunch:
    """A callable for `torch.multiprocessing`, which passes the process index as first argument.

    The caller sets `WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT`.

    Args:
        launcher: What to run.
        distributed_type: How the processes work together; `"NO"` if they do not.
        debug: Use the file in `ACCELERATE_DEBUG_RDV_FILE` for the rendezvous, and gloo.

    Example:
        >>> from accel_state import patch_environment
        >>> with patch_environment(FORK_LAUNCHED=1):  # every started process gets this variable
        ...     PrepareForLaunch(lambda a, b: a + b)(0, 1, 2)
        3
    """

    def __init__(
        self,
        launcher: Callable[..., Any],
        distributed_type: DistributedType | str = "NO",
        debug: bool = False,
    ) -> None:
        self.launcher = launcher
        self.distributed_type = DistributedType(distributed_type)
        self.debug = debug

    def __call__(self, index: int, *args: Any) -> Any:
        """Run the function as the process with the given index.

        Args:
            index: Local rank of the process.
            *args: Arguments of the function.

        Raises:
            SettingsError: The environment lacks the variables of the rendezvous.
        """
        variables = environ.read()
        if self.debug:
            missing = [
                name for name in ("ACCELERATE_DEBUG_RDV_FILE", "WORLD_SIZE") if not variables.get(name)
            ]
            if missing:
                raise SettingsError(
                    f"PrepareForLaunch(debug=True) needs {' and '.join(missing)} in the environment: a "
                    "file that does not exist yet, and the number of processes. debug_launcher() sets both."
                )
            world_size = int(variables["WORLD_SIZE"])
            store = torch.distributed.FileStore(variables["ACCELERATE_DEBUG_RDV_FILE"], world_size)
            torch.distributed.init_process_group("gloo", rank=index, store=store, world_size=world_size)
            environ.publish({"LOCAL_RANK": str(index), "RANK": str(index), "ACCELERATE_USE_CPU": "yes"})
        elif self.distributed_type.value != "NO":
            local = int(variables.get("NPROC") or variables.get("WORLD_SIZE") or 1)
            node = int(variables.get("NODE_RANK") or 0)
            environ.publish({"LOCAL_RANK": str(index), "RANK": str(local * node + index)})
        return _run_forked(self.launcher, *args)


def test_launch() -> None:
    """Create a `PartialState`, to check the rendezvous."""
    PartialState()


ELASTIC_LOG_LINE_PREFIX_TEMPLATE_PYTORCH_VERSION = "2.2.0"
"""The first version of torch that knows `log_line_prefix_template`."""
