"""Run a function or a script in several processes, from typed settings alone."""

from __future__ import annotations

import runpy
import sys
from functools import partial
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any

from accel_state import environ
from accel_state.devices.kinds import CPU, available_kind
from accel_state.errors import SettingsError
from accel_state.ports import free_port
from accel_state.settings.environ import worker_environ
from accel_state.settings.model import Settings
from accel_state.topology import DEFAULT_PORT
from accel_train.forking import Machines, refuse_initialised_devices
from accel_train.forking import launch as run_in_forks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def launch(
    function_or_script: Callable[..., Any] | str | PathLike[str],
    args: Sequence[Any] = (),
    *,
    config: Settings | None = None,
) -> dict[int, Any]:
    """Run a function or a script in as many processes as the settings say, as `accel launch` does.

    Neither a config file nor the variables of settings in the environment are read: the settings are all.

    Args:
        function_or_script: A function whose result can be pickled, or the path of a Python script.
        args: What the function is called with, or the words after the script.
        config: The settings; those of `Settings()` if None, which runs one process per accelerator.

    Returns:
        By rank, for the processes of this machine: what the function returned, or what the script calls
        `result`, None if nothing.

    Raises:
        SettingsError: The settings do not fit together, or a device was initialised already.
        WorkerFailedError: A process failed; the message has rank and traceback.
        UnsupportedError: This system cannot fork.

    Example:
        >>> from accel_state.settings import LaunchSettings, ProcessSettings, Settings
        >>> two = Settings(process=ProcessSettings(use_cpu=True), launch=LaunchSettings(num_processes=2))
        >>> launch(lambda word: word.upper(), ("trained",), config=two)
        {0: 'TRAINED', 1: 'TRAINED'}
    """
    settings = Settings() if config is None else config
    chosen = settings.launch
    on_cpu = settings.process.use_cpu or chosen.distributed_type == "MULTI_CPU"
    kind = CPU if on_cpu else available_kind()
    count = chosen.num_processes or chosen.num_machines * _devices(kind.module)
    if count % chosen.num_machines:
        raise SettingsError(
            f"launch(config=...): {count} processes cannot be divided evenly among {chosen.num_machines} "
            "machines."
        )
    if kind.type != "cpu":
        refuse_initialised_devices()
    machines = Machines(
        endpoint=_endpoint(settings),
        num_nodes=chosen.num_machines,
        node_rank=chosen.machine_rank,
        backend=chosen.rdzv_backend,
    )
    started = machines.config(
        count // chosen.num_machines,
        max_restarts=chosen.max_restarts,
        monitor_interval=chosen.monitor_interval,
    )
    before = environ.read()
    with environ.clear_environment():
        environ.publish(worker_environ(settings, before))
        return run_in_forks(_callable(function_or_script), args, started)


def _callable(given: Callable[..., Any] | str | PathLike[str]) -> Callable[..., Any]:
    return partial(_run_script, fspath(given)) if isinstance(given, (str, PathLike)) else given


def _run_script(script: str, *words: Any) -> Any:
    sys.argv[:] = [script, *map(str, words)]
    return runpy.run_path(script, run_name="__main__").get("result")


def _devices(module: Any) -> int:
    return max(1, module.device_count()) if hasattr(module, "device_count") else 1


def _endpoint(settings: Settings) -> str:
    chosen = settings.launch
    if chosen.num_machines == 1:
        return f"127.0.0.1:{chosen.main_process_port or free_port()}"
    if chosen.main_process_ip is None:
        raise SettingsError(
            f"launch(config=...): {chosen.num_machines} machines need to know where to meet: set "
            "launch.main_process_ip."
        )
    return f"{chosen.main_process_ip}:{chosen.main_process_port or DEFAULT_PORT}"
