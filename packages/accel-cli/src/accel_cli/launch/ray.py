"""Run a job on a Ray cluster: an actor per rank, in a placement group with a bundle per node.

This is the only importer of Ray in the command. Each actor starts the script in a child process and sends its
output to the launcher. The launcher prints it, forwards signals, and restarts all ranks if one fails.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import yaml

from accel_cli.launch.hosts import VISIBLE_DEVICES, count_cores
from accel_cli.launch.launchers import (
    STOP_SIGNALS,
    WORKER,
    Command,
    alias_path,
    handle_signals,
    require_script,
    say,
    worker_line,
)
from accel_cli.main import ERROR
from accel_cli.output import first_line
from accel_state.environ import read
from accel_state.errors import SettingsError
from accel_state.frozen import frozen
from accel_state.settings import to_environ

if TYPE_CHECKING:
    from accel_cli.launch.command import LaunchPlan


def ray_command(plan: LaunchPlan) -> Command:
    """Return this module, with the job as JSON, as the program."""
    require_script(plan)
    line = (sys.executable, "-m", "accel_cli.launch.ray", json.dumps(job_of(plan)))
    return Command(command=line, environ={**plan.environ, **alias_path(plan)})


def dry_run(plan: LaunchPlan) -> str:
    """Return the job as YAML, with the variables that the settings become."""
    shown = {**job_of(plan), "environment": {**to_environ(plan.merged.settings), **alias_path(plan)}}
    return yaml.safe_dump(shown, sort_keys=False, width=100).rstrip()


def job_of(plan: LaunchPlan) -> dict[str, Any]:
    """Return the job of a plan as data for the Ray launcher.

    Raises:
        SettingsError: Arguments are for other launchers.
    """
    sourced = [plan.merged.source_of(f"launch.{name}") for name in _OF_OTHERS]
    if names := [source.origin for source in sourced if source.value is not None]:
        is_one = "is" if len(names) == 1 else "are"
        raise SettingsError(f"{', '.join(names)} {is_one} not supported with --launcher ray.")
    launch, cluster, local = plan.launch, plan.merged.settings.cluster, plan.local_processes
    gpus = {} if cluster.gpus_per_node is None else {"GPU": cluster.gpus_per_node}
    threads = launch.num_cpu_threads_per_process
    return {
        "address": cluster.ray_address,
        "strategy": cluster.ray_strategy,
        "bundles": [{"CPU": local, **gpus} for _ in range(launch.num_machines)],
        "ranks_per_bundle": local,
        "max_restarts": launch.max_restarts,
        "grace": _GRACE if launch.shutdown_timeout is None else launch.shutdown_timeout,
        "threads": threads,
        "command": [WORKER, *(["--program"] if launch.no_python else []), *worker_line(plan, aloud=True)],
    }


_GRACE = 30
"""Grace time in seconds of processes after a signal, as under torch.distributed.run."""

_OF_OTHERS = (
    "machine_rank", "main_process_ip", "main_process_port", "rdzv_backend", "rdzv_conf", "min_machines",
    "gpu_ids", "monitor_interval", "tee", "log_dir", "role",
)  # fmt: skip
"""Launch settings that apply to torch.distributed.run only."""


@frozen
class Location:
    """The node and devices of an actor.

    Args:
        node: The id of its node.
        address: The IP address of its node.
        port: A free TCP port of its node.
        cores: Number of usable CPU cores.
        gpus: The GPUs that Ray assigned.
    """

    node: str
    address: str
    port: int
    cores: int
    gpus: tuple[str, ...] = ()


def order_ranks(locations: Sequence[Location]) -> list[int]:
    """Return the order of actors by rank, with consecutive ranks on each node.

    Example:
        >>> order_ranks([Location(node=node, address="", port=0, cores=1) for node in "aba"])
        [0, 2, 1]
    """
    nodes = list(dict.fromkeys(location.node for location in locations))
    return sorted(range(len(locations)), key=lambda index: nodes.index(locations[index].node))


def rank_environs(locations: Sequence[Location], attempt: int) -> list[dict[str, str]]:
    """Return the variables of each rank, as torch.distributed.run sets them.

    Args:
        locations: The locations of the actors in rank order.
        attempt: Number of earlier starts of the ranks.

    Example:
        >>> first, second = [Location(node=name, address="10.0.0.1", port=29400, cores=8) for name in "ab"]
        >>> environ = rank_environs([first, second], 0)[1]
        >>> environ["RANK"], environ["LOCAL_RANK"], environ["GROUP_RANK"], environ["MASTER_ADDR"]
        ('1', '0', '1', '10.0.0.1')
    """
    nodes = list(dict.fromkeys(location.node for location in locations))
    environs: list[dict[str, str]] = []
    for rank, location in enumerate(locations):
        local = [index for index, other in enumerate(locations) if other.node == location.node]
        gpus = [gpu for index in local for gpu in locations[index].gpus]
        environs.append(
            {
                "RANK": str(rank),
                "WORLD_SIZE": str(len(locations)),
                "LOCAL_RANK": str(local.index(rank)),
                "LOCAL_WORLD_SIZE": str(len(local)),
                "GROUP_RANK": str(nodes.index(location.node)),
                "GROUP_WORLD_SIZE": str(len(nodes)),
                "MASTER_ADDR": locations[0].address,
                "MASTER_PORT": str(locations[0].port),
                "TORCHELASTIC_RESTART_COUNT": str(attempt),
                "OMP_NUM_THREADS": str(max(1, location.cores // len(local))),
                # The local rank is a device index: a rank sees the devices of all ranks of its node.
                **({"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}),
            }
        )
    return environs


class Rank:
    """A Ray actor that runs the script in a child process, which ends with the actor."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._output: queue.Queue[tuple[int, bytes] | int] = queue.Queue(maxsize=1000)

    def where(self) -> Location:
        """Return the location of this actor."""
        ray: Any = import_module("ray")
        context = ray.get_runtime_context()
        with socket.socket() as probe:
            probe.bind(("", 0))
            port = probe.getsockname()[1]
        return Location(
            node=context.get_node_id(),
            address=ray.util.get_node_ip_address(),
            port=port,
            cores=count_cores(),
            gpus=tuple(context.get_accelerator_ids().get("GPU", ())),
        )

    def start(self, command: Sequence[str], environ: Mapping[str, str], folder: str | None) -> None:
        """Start the script.

        Args:
            command: The module that every rank runs, and its arguments.
            environ: Variables in addition to those of this process.
            folder: The working directory; None for that of this process.
        """
        ready = threading.Event()
        # On Linux the child ends with the thread that started it, which must not be one of Ray's.
        arguments = (command, {**read(), **environ}, folder, ready)
        threading.Thread(target=self._run, args=arguments, daemon=True).start()
        ready.wait()

    def read(self) -> tuple[list[tuple[int, bytes]], int | None]:
        """Wait for output, or the end of the script.

        Returns:
            Lines with the number of their stream, 1 or 2; and the exit code, None while the script runs.
        """
        lines: list[tuple[int, bytes]] = []
        item = self._output.get()
        while not isinstance(item, int):
            lines.append(item)
            try:
                item = self._output.get_nowait()
            except queue.Empty:
                return lines, None
        return lines, item

    def signal(self, number: int) -> None:
        """Send a signal to the script and its children."""
        if self._process is not None and self._process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    def _run(
        self, command: Sequence[str], environ: dict[str, str], folder: str | None, ready: threading.Event
    ) -> None:
        module, *words = command
        if hasattr(signal, "pthread_sigmask"):  # Ray blocks it, and a child inherits the mask of its thread.
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        line = [sys.executable, "-m", module, f"--launcher={os.getpid()}", *words]
        try:
            self._process = process = subprocess.Popen(
                line, cwd=folder, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            self._output.put((2, f"accel launch: error: {error}\n".encode()))
            self._output.put(ERROR)
            return
        finally:
            ready.set()
        streams = [(1, process.stdout), (2, process.stderr)]
        readers = [threading.Thread(target=self._pass_on, args=item, daemon=True) for item in streams]
        for reader in readers:
            reader.start()
        code = process.wait()
        for reader in readers:  # A remaining child of the script may keep them open.
            reader.join(_LAST_OUTPUT)
        self._output.put(code)

    def _pass_on(self, number: int, stream: IO[bytes]) -> None:
        """Queue the output of a stream line by line."""
        unfinished = b""
        with stream:
            while text := os.read(stream.fileno(), 1 << 16):
                unfinished += text
                if end := max(unfinished.rfind(b"\n"), unfinished.rfind(b"\r")) + 1:
                    self._output.put((number, unfinished[:end]))
                    unfinished = unfinished[end:]
        if unfinished:
            self._output.put((number, unfinished + b"\n"))


_LAST_OUTPUT = 2.0
"""Seconds to wait for the end of the streams after the end of the process."""

LOST = 128 + 9
"""The exit code of a rank whose actor or node has died, as of a shell after SIGKILL."""


class Job:
    """A job, from its placement group to its exit code.

    Args:
        job: The result of `job_of`.
        ray: The module `ray`, connected to a cluster.
    """

    def __init__(self, job: Mapping[str, Any], ray: Any) -> None:
        self._job = job
        self._ray = ray
        self._signals: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._ended_by = 0

    def run(self) -> int:
        """Run the job; return 0, the exit code of the rank that failed first, or 128 plus the signal."""
        names = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")
        with handle_signals(names, lambda number, _: self._signals.put(number)):
            group, code, restarts = self._reserve(), 0, self._job["max_restarts"]
            for attempt in range(restarts + 1):
                if group is None or self._ended_by:
                    break
                if attempt:
                    say(f"restarting all ranks: restart {attempt} of {restarts}")
                code = self._attempt(group, attempt)
                if not code:
                    break
            return 128 + self._ended_by if self._ended_by else code

    def _reserve(self) -> Any:
        """Return the placement group once it is ready; None after a signal."""
        strategy, bundles = self._job["strategy"], self._job["bundles"]
        group = self._ray.util.placement_group(bundles, strategy=strategy)
        since, is_reported = time.monotonic(), False
        while not group.wait(_PAUSE):
            if self._take_signal():
                return None
            if not is_reported and time.monotonic() - since > _NOTICE_TIMEOUT:
                is_reported = True
                has = {name: int(n) for name, n in self._ray.cluster_resources().items() if name in _SHOWN}
                say(f"waiting for {len(bundles)} bundles of {bundles[0]} ({strategy}); the cluster has {has}")
        return group

    def _attempt(self, group: Any, attempt: int) -> int:
        """Start all ranks and follow them to their end; return the first non-zero exit code, or 0."""
        ray, size = self._ray, self._job["ranks_per_bundle"]
        strategy = import_module("ray.util.scheduling_strategies").PlacementGroupSchedulingStrategy
        # The class of the imported module, not of `__main__`: nodes import it.
        actor = ray.remote(import_module("accel_cli.launch.ray").Rank)
        gpus = min(1, self._job["bundles"][0].get("GPU", 0) // size)
        actors = [
            actor.options(
                num_cpus=1, num_gpus=gpus, max_concurrency=4,
                scheduling_strategy=strategy(group, placement_group_bundle_index=index // size),
            ).remote()
            for index in range(size * len(self._job["bundles"]))
        ]  # fmt: skip
        try:
            locations = self._until([rank.where.remote() for rank in actors])
            if locations is None:
                return 0
            order = order_ranks(locations)
            actors, locations = [actors[index] for index in order], [locations[index] for index in order]
            self._start(actors, locations, attempt)
            nodes = list(dict.fromkeys(location.node for location in locations))
            numbers = [nodes.index(location.node) for location in locations]
            return self._follow([*zip(actors, numbers, strict=True)])
        except ray.exceptions.RayError as error:
            say(f"could not start the ranks: {first_line(error)}")
            return LOST
        finally:
            for rank in actors:
                ray.kill(rank)

    def _start(self, actors: Sequence[Any], locations: Sequence[Location], attempt: int) -> None:
        context = self._ray.get_runtime_context()
        # If the job has a working directory, Ray runs its actors in their node's copy of it.
        folder = None if context.runtime_env.get("working_dir") else str(Path.cwd())
        # Variables that describe a node or its Ray must not be copied to another node.
        of_node = {"HOSTNAME", *VISIBLE_DEVICES.values()}
        ours = {
            name: value
            for name, value in read().items()
            if not name.startswith("RAY_") and name not in of_node
        }
        threads = self._job["threads"] or ours.get("OMP_NUM_THREADS")
        fixed = {"OMP_NUM_THREADS": str(threads)} if threads else {}
        self._ray.get(
            [
                actor.start.remote(
                    self._job["command"], {"PYTHONUNBUFFERED": "1", **ours, **environ, **fixed}, folder
                )
                for actor, environ in zip(actors, rank_environs(locations, attempt), strict=True)
            ]
        )

    def _until(self, references: Sequence[Any]) -> list[Any] | None:
        """Return the results when all are ready; None after a termination signal."""
        while len(self._ray.wait(references, num_returns=len(references), timeout=_PAUSE)[0]) < len(
            references
        ):
            if self._take_signal():
                return None
        return self._ray.get(references)

    def _follow(self, ranks: Sequence[tuple[Any, int]]) -> int:
        """Print the output of the ranks until all have ended; end the others if one fails."""
        ray, is_several = self._ray, len(ranks) > 1
        first, deadline = 0, float("inf")
        waiting = {actor.read.remote(): rank for rank, (actor, _) in enumerate(ranks)}
        while waiting and time.monotonic() < deadline:
            for reference in ray.wait(list(waiting), timeout=_PAUSE)[0]:
                rank = waiting.pop(reference)
                actor, node = ranks[rank]
                name = f"node {node} rank {rank}"
                try:
                    lines, code = ray.get(reference)
                except ray.exceptions.RayError as error:
                    lines, code = [], LOST
                    say(f"{name} is lost: {first_line(error)}")
                _write(lines, f"{name}: " if is_several else "")
                if code is None:
                    waiting[actor.read.remote()] = rank
                elif code and not first and not self._ended_by:
                    first = 128 - code if code < 0 else code
                    say(f"{name} exited with {first}")
                    deadline = self._end(ranks, waiting.values(), signal.SIGTERM)
            is_second = bool(self._ended_by)
            for number in self._received():
                if number == signal.SIGINT and is_second:  # Ctrl-C again
                    return first
                if number in STOP_SIGNALS:
                    deadline = self._end(ranks, waiting.values(), number)
                else:
                    self._send(ranks, waiting.values(), number)
        return first

    def _end(self, ranks: Sequence[tuple[Any, int]], running: Iterable[int], number: int) -> float:
        """Send a termination signal to ranks; return the deadline of their grace time."""
        self._send(ranks, running, number)
        return time.monotonic() + self._job["grace"]

    def _send(self, ranks: Sequence[tuple[Any, int]], running: Iterable[int], number: int) -> None:
        for rank in running:
            ranks[rank][0].signal.remote(int(number))

    def _received(self) -> list[int]:
        """Return the received signals; record the first termination signal."""
        numbers: list[int] = []
        with suppress(queue.Empty):
            while True:
                numbers.append(self._signals.get_nowait())
        for number in numbers:
            if number in STOP_SIGNALS and not self._ended_by:
                self._ended_by = number
        return numbers

    def _take_signal(self) -> bool:
        """Return whether a termination signal has arrived before the start."""
        self._received()
        return bool(self._ended_by)


_PAUSE = 0.2
"""Seconds between two checks for signals."""

_NOTICE_TIMEOUT = 10.0
"""Seconds after which the launcher prints what it is waiting for."""

_SHOWN = ("CPU", "GPU")


def _write(lines: Iterable[tuple[int, bytes]], prefix: str) -> None:
    """Write the output of a rank to the same stream of this process, with a prefix on each line."""
    for number, text in lines:
        with os.fdopen(number, "wb", closefd=False) as stream:
            stream.write(b"".join(prefix.encode() + line for line in text.splitlines(keepends=True)))


def main(arguments: Sequence[str]) -> int:
    """Connect to the cluster and run a job.

    Args:
        arguments: The job as JSON.

    Returns:
        The exit code of the job, or 2 if there is no cluster.
    """
    job = json.loads(arguments[0])
    ray: Any = import_module("ray")
    sys.stdout = sys.stderr  # Messages of Ray, such as that a worker has died, are not output of the script.
    try:
        host, colon, port = job["address"].removeprefix("ray://").rpartition(":")
        if colon and port.isdecimal():  # Ray would end this process if nothing listens there.
            socket.create_connection((host.strip("[]"), int(port)), timeout=_NOTICE_TIMEOUT).close()
        ray.init(address=job["address"], log_to_driver=False, logging_level="WARNING")
    except (OSError, ValueError, RuntimeError) as error:
        say(f"error: no Ray cluster found at {job['address']!r}: {first_line(error)}")
        return ERROR
    try:
        return Job(job, ray).run()
    finally:
        ray.shutdown()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
