"""Run a script on trial as ranks of a job, each in a process of its own. Nothing here imports torch."""

from __future__ import annotations

import contextlib
import functools
import inspect
import multiprocessing
import os
import pkgutil
import runpy
import sys
import time
import traceback
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from multiprocessing import connection
from pathlib import Path
from typing import Any

from accel_cli.config_file import read_config
from accel_state import environ, platforms
from accel_state.errors import SettingsError
from accel_state.frozen import frozen
from accel_state.rank_status import call_site
from accel_state.settings import Merged, merge_layers, parse_environ, worker_environ

CONTEXT: Any = multiprocessing.get_context("forkserver" if platforms.SYSTEM == "linux" else "spawn")
"""How ranks start. On Linux all are forked from one process, which has imported what they need."""

ALONE = frozenset({"one", "plain"})
"""The runs of a single process that no launcher has started."""


@frozen
class RankTask:
    """The task of a process.

    Args:
        local_world: Ranks of a node.
        folder: The folder that all processes share, and that the command deletes.
        run: The run that the process belongs to, whose processes share the files that they write.
        port: The port of rank 0 at which ranks meet.
        batches: Number of batches of every loader, for `accel check`.
        steps: Optimizer steps of each pass over a training loader, for `accel doctor`.
        saves: Whether a checkpoint is written after the first optimizer step.
        blocks: The number of layers that each list of layers is cut to; 0 keeps all.
        shards: As the last two, what the run on the ranks has recorded: ranks with batches of their own.
        loaders_at_save: Loaders that were read before the checkpoint was written.
        saves_within_epoch: Whether the script saves its state while it reads a loader.
    """

    script: str
    arguments: tuple[str, ...] = ()
    rank: int
    world: int
    local_world: int
    folder: str
    run: str = "check"
    port: int = 29500
    batches: int = 0
    steps: int = 0
    saves: bool = False
    blocks: int = 0
    shards: int = 1
    loaders_at_save: int = 0
    saves_within_epoch: bool = False

    @property
    def environment(self) -> dict[str, str]:
        """The variables by which launchers pass rank and world size to a process."""
        variables = {
            "RANK": self.rank,
            "WORLD_SIZE": self.world,
            "LOCAL_RANK": self.rank % self.local_world,
            "LOCAL_WORLD_SIZE": self.local_world,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": self.port,
        }
        return {} if self.run in ALONE else {name: str(value) for name, value in variables.items()}

    @property
    def log(self) -> Path:
        """The file with what the process prints."""
        return Path(self.folder) / f"{self.run}-{self.rank}.log"


def settings_of(options: Namespace) -> tuple[Merged, Mapping[str, str]]:
    """Return the settings of a run of a script, and the variables of this process.

    Raises:
        SettingsError: The script does not exist, or settings are invalid.
    """
    if not Path(options.script).is_file():
        raise SettingsError(f"script {options.script!r} does not exist.")
    variables = environ.read()
    config = read_config(options.config_file, variables).sourced
    return merge_layers(options.settings, parse_environ(variables), config), variables


def environ_on_cpu(merged: Merged, variables: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a worker on the CPU, which compiles nothing."""
    settings = replace(
        merged.settings, process=replace(merged.settings.process, use_cpu=True, torch_device=None)
    )
    return {**worker_environ(settings, variables), "ACCELERATE_DYNAMO_BACKEND": "NO"}


def run_ranks(
    tasks: Sequence[RankTask],
    worker: str,
    variables: Mapping[str, str],
    *,
    timeout: int,
    late: str,
    at_once: int | None = None,
    grace: int | None = None,
) -> list[Any]:
    """Run tasks, each in its own process.

    Args:
        tasks: The tasks.
        worker: The module whose `main` runs a task, and returns its record.
        variables: The environment of all.
        timeout: Seconds that each may take.
        late: The reason why there is no record of a process that was stopped.
        at_once: The number of processes at a time; by default that of the cores.
        grace: Seconds that the others are left when one has failed; `timeout` if None.

    Returns:
        The record of each task, or the reason why there is none.
    """
    # Fake tensors need little of the compiler, but import it.
    preloaded = [worker, "torch._dynamo"]
    if "transformers" in Path(tasks[0].script).read_text("utf-8", "replace"):
        preloaded.append("transformers.modeling_utils")
    CONTEXT.set_forkserver_preload(preloaded)
    waiting, running, records = [*reversed(tasks)], dict[RankTask, tuple[Any, Any, float]](), {}
    try:
        while waiting or running:
            while waiting and len(running) < (at_once or os.cpu_count() or 1):
                task = waiting.pop()
                receiver, sender = CONTEXT.Pipe(duplex=False)
                process = CONTEXT.Process(target=_run_rank, args=(worker, task, variables, sender))
                process.start()
                sender.close()
                running[task] = (process, receiver, time.monotonic() + timeout)
            handles = [
                handle for process, *both, _ in running.values() for handle in (process.sentinel, *both)
            ]
            connection.wait(handles, max(0.0, min(end for *_, end in running.values()) - time.monotonic()))
            for task, (process, receiver, end) in [*running.items()]:
                if (record := _record_of(task, process, receiver, end, late)) is None:
                    continue
                records[task] = record
                del running[task]
                if isinstance(record, str) and grace is not None:
                    soon = time.monotonic() + grace
                    running = {key: (*both, min(end, soon)) for key, (*both, end) in running.items()}
    finally:
        for process, *_ in running.values():
            process.kill()
    return [records[task] for task in tasks]


def _record_of(task: RankTask, process: Any, receiver: Any, end: float, late: str) -> Any:
    """Return the record of a process, or why there is none; None if it may still come."""
    if receiver.poll():
        with contextlib.suppress(EOFError):
            return receiver.recv()
        process.join()
    elif process.exitcode is None:
        if time.monotonic() < end:
            return None
        process.kill()
        process.join()
        return late
    lines = task.log.read_text("utf-8", "replace").strip().splitlines() or ["no output"]
    return f"it exited with code {process.exitcode}: {lines[-1]}"


def _run_rank(worker: str, task: RankTask, variables: Mapping[str, str], sender: Any) -> None:
    """Run a task in its process, and end the process."""
    multiprocessing.set_start_method(None, force=True)  # of the script's own processes: the usual one
    code = 1
    try:
        with task.log.open("wb") as log:
            for stream in (1, 2):
                os.dup2(log.fileno(), stream)
        environ.set_environment({**variables, **task.environment})
        sender.send(import_module(worker).main(task))
        code = 0
    except BaseException:  # noqa: BLE001 - the process ends here
        traceback.print_exc()
    finally:
        # Clearing every module of torch would take a fifth of a short check.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def run_script(task: RankTask) -> str:
    """Run the script; return the reason if it stopped early."""
    sys.argv = [task.script, *task.arguments]
    sys.path.insert(0, str(Path(task.script).resolve().parent))
    try:
        runpy.run_path(str(Path(task.script).absolute()), run_name="__main__")
    except SystemExit as exit_request:
        return "" if exit_request.code in {None, 0} else f"it exits with {exit_request.code!r}"
    except Exception as error:  # noqa: BLE001 - whatever the script raises is reported
        traceback.print_exc()
        path, frames = Path(task.script).resolve(), traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if Path(frame.filename).resolve() == path]
        where = f" at {path.name}:{lines[-1]}" if lines else ""
        first, *_ = str(error).strip().splitlines() or [""]
        return f"{type(error).__name__}{where}: {first}"
    return ""


def replace_names(path: str, **patches: Any) -> None:
    """Set existing attributes of a module or class."""
    owner = pkgutil.resolve_name(path)
    for name, patch in patches.items():
        if not hasattr(owner, name):
            raise AttributeError(f"{path} has no {name} to replace")
        setattr(owner, name, patch)


def wrap_names(path: str, **wrappers: Callable[..., Any]) -> None:
    """Call existing functions of a module or class through wrappers, which get the function first."""
    owner = pkgutil.resolve_name(path)
    for name, wrapper in wrappers.items():
        declared = inspect.getattr_static(owner, name)
        call = _wrap(getattr(declared, "__func__", declared), wrapper)
        is_bound = isinstance(declared, (staticmethod, classmethod))
        setattr(owner, name, type(declared)(call) if is_bound else call)


def _wrap(function: Callable[..., Any], wrapper: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        return wrapper(function, *args, **options)

    return call


def source_line() -> str:
    """Return file and line of the script that is running."""
    return call_site(sys._getframe(1))[0]
