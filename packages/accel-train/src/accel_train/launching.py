"""Launch functions and scripts from Python: notebook_launcher, debug_launcher and launch."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import fields
from functools import partial
from os import PathLike, fspath
from pathlib import Path
from typing import Any, get_args

import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std

from accel_state import environ
from accel_state.device_kinds import CPU, DeviceKind, available_kind, peer_variables
from accel_state.errors import SettingsError
from accel_state.labels import DistributedType
from accel_state.partial_state import PartialState
from accel_state.settings import Settings, from_environ, merge_layers, parse_file, worker_environ
from accel_state.settings.model import Precision, value_at
from accel_state.settings.run import ClusterSettings
from accel_state.topology import DEFAULT_PORT
from accel_train.forking import (
    launch_config,
    launch_forked,
    refuse_initialised_devices,
    reserve_port,
    run_forked,
)


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
        use_port: The port of rank 0; 0 for any free port. If the default port is in use on a single machine,
            another port is used.
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
    has_precision = mixed_precision.lower() != "no"
    variables = {"accelerate_mixed_precision": mixed_precision} if has_precision else {}
    kind = CPU if from_environ(environ.read()).process.use_cpu else available_kind()
    count = device_count(kind.module) if num_processes is None else num_processes
    _check_numbers(count, num_nodes, node_rank, max_restarts)
    # 2. Without a fork: start processes by the device's own runtime, or run in this process.
    if kind.own_runtime is not None and num_processes != 1:
        refuse_initialised_devices()
        with environ.patch_environment(**variables):
            return kind.own_runtime.run_on_each_device(function, args, num_processes)
    listener = nullcontext(0) if rdzv_endpoint else _notebook_port(use_port, num_nodes, node_rank)
    plain = rdzv_backend == "static" and not (rdzv_endpoint or max_restarts or log_line_prefix_template)
    if plain and count == num_nodes == 1:
        with environ.patch_environment(**variables):
            return {0: function(*args)}
    # 3. Fork the processes.
    if kind.type != "cpu":
        refuse_initialised_devices()
    if kind.name == "cuda":
        variables |= peer_variables(environ.read())
    with listener as port, environ.patch_environment(**variables):
        config = launch_config(
            count,
            num_nodes=num_nodes,
            node_rank=node_rank,
            rdzv_endpoint=rdzv_endpoint or f"{master_addr}:{port}",
            rdzv_backend=rdzv_backend,
            rdzv_conf=rdzv_conf,
            run_id=rdzv_id,
            max_restarts=max_restarts,
            monitor_interval=monitor_interval,
            log_line_prefix_template=log_line_prefix_template,
            logs_specs=DefaultLogsSpecs(tee=Std.NONE if log_line_prefix_template is None else Std.ALL),
        )
        return launch_forked(function, args, config)


def _notebook_port(use_port: str | int, num_nodes: int, node_rank: int) -> AbstractContextManager[int]:
    """Yield the port on which rank 0 listens."""
    if not str(use_port).isdigit():
        raise SettingsError(f"notebook_launcher(use_port={use_port!r}): expected the number of a port.")
    port = int(use_port)
    if num_nodes > 1 and port == 0:
        raise SettingsError("notebook_launcher(use_port=0): several machines need a fixed port.")
    if node_rank > 0:
        return nullcontext(port)
    is_default = num_nodes == 1 and port == DEFAULT_PORT
    return reserve_port(port, "notebook_launcher: use_port", or_any=is_default)


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
    _check_numbers(num_processes, 1, 0, 0)
    with reserve_port(0, "debug_launcher: port") as port, environ.patch_environment(accelerate_use_cpu="yes"):
        return launch_forked(function, args, launch_config(num_processes, rdzv_endpoint=f"127.0.0.1:{port}"))


def _check_numbers(num_processes: int, num_nodes: int, node_rank: int, max_restarts: int) -> None:
    counts = {"num_processes": num_processes, "num_nodes": num_nodes, "max_restarts": max_restarts}
    for name, value in counts.items():
        least = 0 if name == "max_restarts" else 1
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise SettingsError(f"{name}={value!r}: expected a whole number of at least {least}.")
    if not 0 <= node_rank < num_nodes:
        raise SettingsError(f"node_rank={node_rank!r} is not one of num_nodes={num_nodes!r}, counted from 0.")


def launch(
    function_or_script: Callable[..., Any] | str | PathLike[str],
    args: Sequence[Any] = (),
    *,
    config: Settings | Mapping[str, Any] | None = None,
) -> dict[int, Any]:
    """Run a function or a script in the configured number of processes, as `accel launch` does.

    Neither a config file nor the environment variables of settings are read: only `config` counts.

    Args:
        function_or_script: A function whose result can be pickled, or the path of a Python script; the name
            of a module, if the settings say `launch.module`.
        args: What the function is called with, or the words after the script.
        config: The settings, or the table of a config file; `Settings()` if None, which runs one process
            per accelerator.

    Returns:
        By rank, for the processes of this machine: the function's result, or the script's variable `result`
            (None if absent).

    Raises:
        SettingsError: The settings contradict each other or need the command, the script does not exist, or a
            device is already initialised.
        WorkerFailedError: A process failed; the message has rank and traceback.
        UnsupportedError: This system cannot fork.

    Example:
        >>> from accel_state.settings import LaunchSettings, ProcessSettings, Settings
        >>> two = Settings(process=ProcessSettings(use_cpu=True), launch=LaunchSettings(num_processes=2))
        >>> launch(lambda word: word.upper(), ("trained",), config=two)
        {0: 'TRAINED', 1: 'TRAINED'}
    """
    # 1. Check the settings, and count the processes of this machine.
    settings = _resolve_settings(config)
    chosen = settings.launch
    work = _make_callable(function_or_script, is_module=chosen.module)
    kind = _choose_device_kind(settings)
    ids = chosen.device_ids
    per_node = 1 if chosen.distributed_type == "NO" else len(ids) or device_count(kind.module)
    count = chosen.num_processes or chosen.num_machines * per_node
    if count % chosen.num_machines:
        raise SettingsError(
            f"launch(config=...): {count} processes cannot be divided by {chosen.num_machines} machines."
        )
    if kind.type != "cpu":
        refuse_initialised_devices()
    # 2. Collect the variables that make up the environment of the processes.
    variables = worker_environ(settings, environ.read())
    if chosen.num_cpu_threads_per_process is not None:
        variables["OMP_NUM_THREADS"] = str(chosen.num_cpu_threads_per_process)
    if ids and kind.visible_devices_env:
        variables[kind.visible_devices_env] = ",".join(ids)
    # 3. Fork the processes.
    with _function_rendezvous(settings) as endpoint, environ.clear_environment():
        environ.publish(variables)
        options = launch_config(
            count // chosen.num_machines,
            num_nodes=chosen.num_machines,
            node_rank=chosen.machine_rank,
            rdzv_endpoint=endpoint,
            rdzv_backend=chosen.rdzv_backend,
            max_restarts=chosen.max_restarts,
            monitor_interval=chosen.monitor_interval,
        )
        run = partial(_run_with_threads, chosen.num_cpu_threads_per_process, work)
        return launch_forked(run, args, options)


_COMMAND_ONLY = (
    *(f"launch.{name}" for name in ("compute_environment", "min_machines", "tee", "log_dir", "role")),
    *("launch.no_python", "launch.quiet", "launch.rdzv_conf", "mpi.hostfile", "hosts.hostfile"),
    *("launch.shutdown_timeout", "launch.launcher", "launch.on_tpu", "tpu.use_cluster"),
    "process.as_accelerate",
    *(f"cluster.{field.name}" for field in fields(ClusterSettings)),
)
"""The settings that only the command carries out."""


def _resolve_settings(config: Settings | Mapping[str, Any] | None) -> Settings:
    """Return the settings of `config`; refuse settings that only the command implements."""
    if isinstance(config, Mapping):
        config = merge_layers(parse_file(config, "launch(config=...)")).settings
    elif isinstance(config, (str, PathLike)):
        raise SettingsError(
            f"launch(config={fspath(config)!r}): expected settings, or the table that the file holds: "
            f"`config=yaml.safe_load(open({fspath(config)!r}))`."
        )
    elif config is not None and not isinstance(config, Settings):
        raise SettingsError(f"launch(config={config!r}): expected accel.settings.Settings.")
    settings, defaults = config or Settings(), Settings()
    refused = [path for path in _COMMAND_ONLY if value_at(settings, path) != value_at(defaults, path)]
    if refused:
        raise SettingsError(
            f"launch(config=...): {', '.join(refused)} {'is' if len(refused) == 1 else 'are'} supported "
            "only by the command `accel launch`."
        )
    return settings


def _choose_device_kind(settings: Settings) -> DeviceKind:
    """Return the kind of devices to run on."""
    requested = settings.launch.distributed_type
    if settings.process.use_cpu or requested == "MULTI_CPU":
        return CPU
    kind = available_kind()
    if requested is not None and requested.startswith("MULTI_") and requested != kind.distributed_type.value:
        raise SettingsError(
            f"launch(config=...): distributed_type is {requested!r}, but this machine has no such device."
        )
    return kind


def device_count(module: Any) -> int:
    """Return the number of accelerators, without initialising one."""
    return max(1, module.device_count()) if hasattr(module, "device_count") else 1


def _make_callable(work: Callable[..., Any] | str | PathLike[str], *, is_module: bool) -> Callable[..., Any]:
    """Return the function that every process calls."""
    if callable(work):
        return work
    if not isinstance(work, (str, PathLike)):
        raise SettingsError(f"launch({work!r}): expected a function, or the path of a script.")
    name = fspath(work)
    if not (is_module or Path(name).is_file()):
        raise SettingsError(f"launch({name!r}): the script does not exist.")
    return partial(_run_module if is_module else _run_script, name)


def _run_with_threads(threads: int | None, work: Callable[..., Any], *args: Any) -> Any:
    """Call a function with a number of threads; torch reads `OMP_NUM_THREADS` only at import."""
    if threads is not None:
        torch.set_num_threads(threads)
    return work(*args)


def _run_script(script: str, *words: Any) -> Any:
    sys.argv[:] = [script, *map(str, words)]
    sys.path.insert(0, str(Path(script).resolve().parent))
    return runpy.run_path(str(Path(script).absolute()), run_name="__main__").get("result")


def _run_module(name: str, *words: Any) -> Any:
    sys.argv[:] = [name, *map(str, words)]
    sys.path.insert(0, str(Path.cwd()))
    return runpy.run_module(name, run_name="__main__", alter_sys=True).get("result")


@contextmanager
def _function_rendezvous(settings: Settings) -> Generator[str]:
    """Yield the rendezvous endpoint, `<address>:<port>`; node 0 is already listening on it."""
    chosen = settings.launch
    address = "127.0.0.1" if chosen.num_machines == 1 else chosen.main_process_ip
    if address is None:
        raise SettingsError(
            f"launch(config=...): {chosen.num_machines} machines need a rendezvous: set "
            "launch.main_process_ip."
        )
    port = chosen.main_process_port or (0 if chosen.num_machines == 1 else DEFAULT_PORT)
    if chosen.machine_rank > 0:
        yield f"{address}:{port}"
        return
    with reserve_port(port, "launch(config=...): main_process_port") as chosen_port:
        yield f"{address}:{chosen_port}"


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
        return run_forked(self.launcher, *args)


def test_launch() -> None:
    """Create a `PartialState`, to check the rendezvous."""
    PartialState()


ELASTIC_LOG_LINE_PREFIX_TEMPLATE_PYTORCH_VERSION = "2.2.0"
"""The first version of torch that knows `log_line_prefix_template`."""
