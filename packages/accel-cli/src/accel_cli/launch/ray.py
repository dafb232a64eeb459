"""Run a job on a Ray cluster: an actor for each node, which runs `accel launch` there.

This is the only importer of Ray in the command. The launcher reserves the nodes in a placement group, prints
the output of the actors, forwards signals, and restarts all nodes if one fails.
"""

from __future__ import annotations

import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import IO, Any

import yaml

from accel_cli.launch.clusters import follow, node_flags
from accel_cli.launch.hosts import VISIBLE_DEVICES
from accel_cli.launch.launchers import WORKER, require_library, require_script, say
from accel_cli.launch.plan import LaunchPlan
from accel_cli.main import ERROR
from accel_cli.output import first_line, redact_line
from accel_state.environ import read, set_environment
from accel_state.errors import SettingsError
from accel_state.settings import to_environ
from accel_state.topology import free_port


def run(plan: LaunchPlan) -> int:
    """Connect to the cluster, and run the job.

    Returns:
        The exit code of the node that failed first; 128 plus the number of the signal that ended the job; or
        2 if there is no cluster.
    """
    require_script(plan)
    require_library("ray", "ray", "Ray")
    words = node_words(plan)
    set_environment(plan.environ)
    ray, address = import_module("ray"), plan.settings.cluster.ray_address
    sys.stdout = sys.stderr  # Messages of Ray, such as that a worker has died, are not output of the script.
    try:
        host, colon, port = address.removeprefix("ray://").rpartition(":")
        if colon and port.isdecimal():  # Ray would end this process if nothing listens there.
            socket.create_connection((host.strip("[]"), int(port)), timeout=_NOTICE_TIMEOUT).close()
        ray.init(address=address, log_to_driver=False, logging_level="WARNING")
    except (OSError, ValueError, RuntimeError) as error:
        say(f"error: no Ray cluster found at {address!r}: {first_line(error)}")
        return ERROR
    try:
        return follow(RayJob(plan, words, ray), _PAUSE, "SIGHUP")
    finally:
        ray.shutdown()


def show(plan: LaunchPlan) -> str:
    """Return the job as YAML: what is reserved, and the command and variables of each node."""
    cluster = plan.settings.cluster
    job = {
        "address": cluster.ray_address,
        "strategy": cluster.ray_strategy,
        "bundles": {"number": plan.num_machines, "each": bundles(plan)[0]},
        "max_restarts": plan.launch.max_restarts,
        "command": redact_line(["accel", "launch", *node_words(plan)]),
        "environment": to_environ(plan.settings),
    }
    return yaml.safe_dump(job, sort_keys=False, width=100).rstrip()


def bundles(plan: LaunchPlan) -> list[dict[str, int]]:
    """Return the resources of each node."""
    gpus = plan.settings.cluster.gpus_per_node
    bundle = {"CPU": plan.local_processes, **({} if gpus is None else {"GPU": gpus})}
    return [dict(bundle) for _ in range(plan.num_machines)]


def node_words(plan: LaunchPlan) -> list[str]:
    """Return the arguments of `accel launch` on each node, without its rank and the rendezvous."""
    if names := [plan.origin(path) for path in _BY_HAND if plan.is_set(path)]:
        is_one = "is" if len(names) == 1 else "are"
        raise SettingsError(f"{', '.join(names)} {is_one} not supported with --launcher ray.")
    flags = node_flags(plan, "launch.max_restarts", "launch.main_process_port")
    counts = [f"--num_machines={plan.num_machines}", f"--num_processes={plan.num_processes}"]
    return [*flags, *counts, "--", plan.script, *plan.script_arguments]


_BY_HAND = ("launch.machine_rank", "launch.main_process_ip", "launch.min_machines", "launch.gpu_ids")
"""Settings that describe a single node, or nodes that join and leave."""


class Node:
    """A Ray actor that runs a command in a child process, which ends with the actor."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._output: queue.Queue[bytes | int] = queue.Queue(maxsize=1000)

    def location(self) -> tuple[str, int]:
        """Return the address of this node, and a free port of it."""
        return import_module("ray").util.get_node_ip_address(), free_port()

    def start(self, words: Sequence[str], environ: Mapping[str, str], folder: str | None) -> None:
        """Start a command in a folder; None for that of this process."""
        ready = threading.Event()
        # On Linux the child ends with the thread that started it, which must not be one of Ray's.
        threading.Thread(target=self._run, args=(words, environ, folder, ready), daemon=True).start()
        ready.wait()

    def read(self) -> tuple[bytes, int | None]:
        """Wait for lines of output, or the exit code; while the command runs it is None."""
        item = self._output.get()
        return (b"", item) if isinstance(item, int) else (item, None)

    def signal(self, number: int) -> None:
        """Send a signal to the command, which forwards it."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)

    def _run(
        self, words: Sequence[str], environ: Mapping[str, str], folder: str | None, ready: threading.Event
    ) -> None:
        if hasattr(signal, "pthread_sigmask"):  # Ray blocks it, and a child inherits the mask of its thread.
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        inherited = {name: value for name, value in read().items() if name != "OMP_NUM_THREADS"}  # of Ray
        line = [sys.executable, "-m", WORKER, f"--launcher={os.getpid()}", "--program", *words]
        try:
            self._process = process = subprocess.Popen(
                line, cwd=folder, env={**inherited, **environ}, stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            self._output.put(f"accel launch: error: {error}\n".encode())
            self._output.put(ERROR)
            return
        finally:
            ready.set()
        reader = threading.Thread(target=self._pass_on, args=(process.stdout,), daemon=True)
        reader.start()
        code = process.wait()
        reader.join(_LAST_OUTPUT)  # A remaining child of the script may keep the stream open.
        self._output.put(code)

    def _pass_on(self, stream: IO[bytes]) -> None:
        """Queue the output line by line."""
        unfinished = b""
        with stream:
            while text := os.read(stream.fileno(), 1 << 16):
                unfinished += text
                if end := max(unfinished.rfind(b"\n"), unfinished.rfind(b"\r")) + 1:
                    self._output.put(unfinished[:end])
                    unfinished = unfinished[end:]
        if unfinished:
            self._output.put(unfinished + b"\n")


_LAST_OUTPUT = 2.0
"""Seconds to wait for the end of the output after the end of the process."""

LOST = 128 + 9
"""The exit code of a node whose actor has died, as of a shell after SIGKILL."""


class RayJob:
    """The nodes of a job.

    Args:
        plan: The plan of the job.
        words: The arguments of `accel launch` on each node.
        ray: The module `ray`, connected to a cluster.
    """

    def __init__(self, plan: LaunchPlan, words: Sequence[str], ray: Any) -> None:
        self._launch, self._words, self._ray = plan.launch, words, ray
        self._bundles, self._strategy = bundles(plan), plan.settings.cluster.ray_strategy
        self._group = ray.util.placement_group(self._bundles, strategy=self._strategy)
        self._attempt, self._is_cancelled = 0, False
        self._reset()

    def _reset(self) -> None:
        self._notice_at = time.monotonic() + _NOTICE_TIMEOUT
        self._nodes: list[Any] = []
        self._locations: list[Any] = []
        self._outputs: dict[Any, int] = {}  # What is awaited from each node that runs.
        self._code, self._deadline = 0, float("inf")

    def poll(self) -> int | None:
        """Start the nodes once they are reserved, show their output, restart all if one has failed."""
        is_starting = not self._outputs and not self._code
        if is_starting and self._is_cancelled:
            return 0
        try:
            if not self._nodes:
                return self._reserve()
            if self._locations:
                return self._start()
        except self._ray.exceptions.RayError as error:
            say(f"could not start the nodes: {first_line(error)}")
            self._locations, self._code = [], LOST
        awaited = [*self._outputs]
        for reference in self._ray.wait(awaited, num_returns=len(awaited), timeout=0)[0] if awaited else ():
            self._show(reference)
        if self._outputs and time.monotonic() < self._deadline:
            return None
        for node in self._nodes:
            self._ray.kill(node)
        if not self._code or self._is_cancelled or self._attempt == self._launch.max_restarts:
            return self._code
        self._attempt += 1
        say(f"restarting all nodes: restart {self._attempt} of {self._launch.max_restarts}")
        self._reset()
        return None

    def cancel(self, number: int) -> None:
        """End all nodes."""
        self._is_cancelled = True
        self._end(number)

    def forward(self, number: int) -> None:
        """Send a signal to all nodes that run."""
        for index in self._outputs.values():
            self._nodes[index].signal.remote(int(number))

    def _end(self, number: int) -> None:
        """Send a termination signal to the nodes that run; they have a grace time."""
        self.forward(number)
        seconds = self._launch.shutdown_timeout
        self._deadline = time.monotonic() + _MARGIN + (_GRACE if seconds is None else seconds)

    def _reserve(self) -> None:
        """Create an actor for each bundle once the placement group is ready."""
        if not self._group.wait(_PAUSE):
            if time.monotonic() > self._notice_at:
                self._notice_at = float("inf")
                has = {
                    key: int(n) for key, n in self._ray.cluster_resources().items() if key in {"CPU", "GPU"}
                }
                wanted = f"{len(self._bundles)} bundles of {self._bundles[0]} ({self._strategy})"
                say(f"waiting for {wanted}; the cluster has {has}")
            return
        strategy = import_module("ray.util.scheduling_strategies").PlacementGroupSchedulingStrategy
        actor = self._ray.remote(Node)
        self._nodes = [
            actor.options(
                num_cpus=bundle["CPU"], num_gpus=bundle.get("GPU", 0), max_concurrency=4,
                scheduling_strategy=strategy(self._group, placement_group_bundle_index=index),
            ).remote()
            for index, bundle in enumerate(self._bundles)
        ]  # fmt: skip
        self._locations = [node.location.remote() for node in self._nodes]

    def _start(self) -> None:
        """Start the command of each node once all actors are there."""
        count = len(self._locations)
        if len(self._ray.wait(self._locations, num_returns=count, timeout=0)[0]) < count:
            return
        address, port = self._ray.get(self._locations)[0]
        port = self._launch.main_process_port or port
        # If the job has a working directory, Ray runs its actors in their node's copy of it.
        has_folder = self._ray.get_runtime_context().runtime_env.get("working_dir")
        # Variables that describe a node or its Ray must not be copied to another node.
        of_node = {"HOSTNAME", *VISIBLE_DEVICES.values()}
        environ = {key: text for key, text in read().items() if key not in of_node and key[:4] != "RAY_"}
        for index, node in enumerate(self._nodes):
            rank = [f"--machine_rank={index}", f"--main_process_ip={address}", f"--main_process_port={port}"]
            words = [sys.executable, "-m", "accel_cli", "launch", *(rank if count > 1 else []), *self._words]
            folder = None if has_folder else str(Path.cwd())
            self._ray.get(node.start.remote(words, {"PYTHONUNBUFFERED": "1", **environ}, folder))
            self._outputs[node.read.remote()] = index
        self._locations = []

    def _show(self, reference: Any) -> None:
        """Print the output of a node, or its end, after which the others end if it has failed."""
        index = self._outputs.pop(reference)
        try:
            text, code = self._ray.get(reference)
        except self._ray.exceptions.RayError as error:
            text, code = b"", LOST
            say(f"node {index} is lost: {first_line(error)}")
        prefix = f"node {index}: ".encode() if len(self._nodes) > 1 else b""
        with os.fdopen(1, "wb", closefd=False) as stream:  # `sys.stdout` is for messages of Ray
            stream.write(b"".join(prefix + line for line in text.splitlines(keepends=True)))
        if code is None:
            self._outputs[self._nodes[index].read.remote()] = index
        elif code and not self._code and not self._is_cancelled:
            self._code = 128 - code if code < 0 else code
            say(f"node {index} exited with {self._code}")
            self._end(signal.SIGTERM)


_PAUSE = 0.2
"""Seconds between two polls."""

_GRACE, _MARGIN = 30, 5
"""Seconds that processes have after a signal, as under torch.distributed.run, and their launchers then."""

_NOTICE_TIMEOUT = 10.0
"""Seconds after which the launcher prints what it is waiting for."""
