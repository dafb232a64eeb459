"""Run a function or a script in several processes, from typed settings alone."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Mapping
from contextlib import contextmanager
from functools import partial
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from accel_state import environ
from accel_state.devices.kinds import CPU, available_kind
from accel_state.errors import SettingsError
from accel_state.settings import Settings, combine, parse_file, worker_environ
from accel_state.settings.model import value_at
from accel_state.topology import DEFAULT_PORT
from accel_train.forking import launch as run_in_forks
from accel_train.forking import launch_config, listening, refuse_initialised_devices
from accel_train.launchers import device_count

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from accel_state.devices.kinds import DeviceKind

_OF_COMMAND = (
    *(f"launch.{name}" for name in ("compute_environment", "min_machines", "tee", "log_dir", "role")),
    *("launch.no_python", "launch.quiet", "launch.rdzv_conf", "mpi.hostfile", "hosts.hostfile"),
    *("tpu.use_cluster", "launch.on_tpu"),
)
"""What only the command carries out."""


def launch(
    function_or_script: Callable[..., Any] | str | PathLike[str],
    args: Sequence[Any] = (),
    *,
    config: Settings | Mapping[str, Any] | None = None,
) -> dict[int, Any]:
    """Run a function or a script in as many processes as the settings say, as `accel launch` does.

    Neither a config file nor the variables of settings in the environment are read: the settings are all.

    Args:
        function_or_script: A function whose result can be pickled, or the path of a Python script; the name
            of a module, if the settings say `launch.module`.
        args: What the function is called with, or the words after the script.
        config: The settings, or the table of a config file; those of `Settings()` if None, which runs one
            process per accelerator.

    Returns:
        By rank, for the processes of this machine: what the function returned, or what the script calls
        `result`, None if nothing.

    Raises:
        SettingsError: The settings do not fit together, ask for what only the command does, or there is no
            such script; or a device was initialised already.
        WorkerFailedError: A process failed; the message has rank and traceback.
        UnsupportedError: This system cannot fork.

    Example:
        >>> from accel_state.settings import LaunchSettings, ProcessSettings, Settings
        >>> two = Settings(process=ProcessSettings(use_cpu=True), launch=LaunchSettings(num_processes=2))
        >>> launch(lambda word: word.upper(), ("trained",), config=two)
        {0: 'TRAINED', 1: 'TRAINED'}
    """
    settings = _settings(config)
    chosen = settings.launch
    work = _callable(function_or_script, is_module=chosen.module)
    kind = _kind(settings)
    ids = chosen.device_ids
    per_node = 1 if chosen.distributed_type == "NO" else len(ids) or device_count(kind.module)
    count = chosen.num_processes or chosen.num_machines * per_node
    if count % chosen.num_machines:
        raise SettingsError(
            f"launch(config=...): {count} processes cannot be divided by {chosen.num_machines} machines."
        )
    if kind.type != "cpu":
        refuse_initialised_devices()
    variables = worker_environ(settings, environ.read())
    if chosen.num_cpu_threads_per_process is not None:
        variables["OMP_NUM_THREADS"] = str(chosen.num_cpu_threads_per_process)
    if ids and kind.visible_devices_env:
        variables[kind.visible_devices_env] = ",".join(ids)
    with _rendezvous(settings) as endpoint, environ.clear_environment():
        environ.publish(variables)
        started = launch_config(
            count // chosen.num_machines,
            num_nodes=chosen.num_machines,
            node_rank=chosen.machine_rank,
            rdzv_endpoint=endpoint,
            rdzv_backend=chosen.rdzv_backend,
            max_restarts=chosen.max_restarts,
            monitor_interval=chosen.monitor_interval,
        )
        return run_in_forks(partial(_run, chosen.num_cpu_threads_per_process, work), args, started)


def _settings(config: Settings | Mapping[str, Any] | None) -> Settings:
    """Return the settings of `config`."""
    if isinstance(config, Mapping):
        config = combine(parse_file(config, "launch(config=...)")).settings
    elif isinstance(config, (str, PathLike)):
        raise SettingsError(
            f"launch(config={fspath(config)!r}): expected settings, or the table that the file holds: "
            f"`config=yaml.safe_load(open({fspath(config)!r}))`."
        )
    elif config is not None and not isinstance(config, Settings):
        raise SettingsError(f"launch(config={config!r}): expected accel.settings.Settings.")
    settings, plain = config or Settings(), Settings()
    asked = [path for path in _OF_COMMAND if value_at(settings, path) != value_at(plain, path)]
    if asked:
        raise SettingsError(
            f"launch(config=...): {', '.join(asked)} {'is' if len(asked) == 1 else 'are'} carried out by the "
            "command `accel launch` only."
        )
    return settings


def _kind(settings: Settings) -> DeviceKind:
    """Return the kind of devices to run on."""
    asked = settings.launch.distributed_type
    if settings.process.use_cpu or asked == "MULTI_CPU":
        return CPU
    kind = available_kind()
    if asked is not None and asked.startswith("MULTI_") and asked != kind.distributed_type.value:
        raise SettingsError(
            f"launch(config=...): distributed_type is {asked!r}, but this machine shows no such device."
        )
    return kind


def _callable(work: Callable[..., Any] | str | PathLike[str], *, is_module: bool) -> Callable[..., Any]:
    """Make the function that every process calls."""
    if callable(work):
        return work
    if not isinstance(work, (str, PathLike)):
        raise SettingsError(f"launch({work!r}): expected a function, or the path of a script.")
    name = fspath(work)
    if not (is_module or Path(name).is_file()):
        raise SettingsError(f"launch({name!r}): there is no such script.")
    return partial(_run_module if is_module else _run_script, name)


def _run(threads: int | None, work: Callable[..., Any], *args: Any) -> Any:
    """Call the function with this number of threads; torch has read the variable for it at import."""
    if threads is not None:
        torch.set_num_threads(threads)
    return work(*args)


def _run_script(script: str, *words: Any) -> Any:
    sys.argv[:] = [script, *map(str, words)]
    sys.path.insert(0, str(Path(script).resolve().parent))
    return runpy.run_path(script, run_name="__main__").get("result")


def _run_module(name: str, *words: Any) -> Any:
    sys.argv[:] = [name, *map(str, words)]
    sys.path.insert(0, str(Path.cwd()))
    return runpy.run_module(name, run_name="__main__", alter_sys=True).get("result")


@contextmanager
def _rendezvous(settings: Settings) -> Generator[str]:
    """Yield the address of the rendezvous, `<address>:<port>`; node 0 listens there already."""
    chosen = settings.launch
    address = "127.0.0.1" if chosen.num_machines == 1 else chosen.main_process_ip
    if address is None:
        raise SettingsError(
            f"launch(config=...): {chosen.num_machines} machines need to know where to meet: set "
            "launch.main_process_ip."
        )
    port = chosen.main_process_port or (0 if chosen.num_machines == 1 else DEFAULT_PORT)
    if chosen.machine_rank > 0:
        yield f"{address}:{port}"
        return
    with listening(port, "launch(config=...): main_process_port") as chosen_port:
        yield f"{address}:{chosen_port}"
