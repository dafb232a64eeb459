"""Run replica groups on this machine: torchft's lighthouse, and an elastic agent per group.

A failed group is restarted while the others continue. The launcher logs these events.
"""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from types import FrameType

from accel_cli.launch.hosts import visible_devices_variable
from accel_cli.launch.launchers import (
    ELASTIC,
    STOP_SIGNALS,
    handle_signals,
    require_library,
    require_script,
    say,
    torchrun_arguments,
)
from accel_cli.launch.plan import LaunchPlan
from accel_cli.output import redact_line
from accel_state.environ import read, set_environment
from accel_state.errors import SettingsError

DEFAULT_RESTARTS = 3
"""Default number of restarts of a group, without --max_restarts."""


def run(plan: LaunchPlan) -> int:
    """Start the lighthouse, unless one is running, and run the groups; return the exit code of the job."""
    require_script(plan)
    words = group_words(plan)
    require_library("replicas", "torchft", "torchft", "accel-plugins[torchft]")
    set_environment({"RUST_LOG": "warn", **plan.environ})  # torchft writes ten lines per step otherwise
    settings, host = plan.settings.replicas, plan.launch.main_process_ip or "127.0.0.1"
    if settings.lighthouse is not None:
        return ReplicaJob(plan, [sys.executable, "-m", ELASTIC, *words], settings.lighthouse).run()
    server = import_module("torchft.coordination").LighthouseServer(
        bind=f"{host}:{plan.launch.main_process_port or 0}",
        min_replicas=settings.min_groups,
        join_timeout_ms=10_000,
        quorum_tick_ms=100,
        heartbeat_timeout_ms=1000 * settings.timeout,
    )
    port = server.address().rpartition(":")[2]
    try:
        return ReplicaJob(plan, [sys.executable, "-m", ELASTIC, *words], f"http://{host}:{port}").run()
    finally:
        server.shutdown()


def show(plan: LaunchPlan) -> str:
    """Return the command line of a group."""
    return shlex.join(redact_line([sys.executable, "-m", ELASTIC, *group_words(plan)]))


def group_words(plan: LaunchPlan) -> list[str]:
    """Return the arguments of the elastic agent of each group."""
    groups, least = plan.settings.replicas.groups, plan.settings.replicas.min_groups
    total = plan.num_processes
    if processes_per_group(plan) * groups != total and (
        plan.is_set("launch.num_processes") or total > groups
    ):
        raise SettingsError(
            f"num_processes is {total}, the total over all groups, and replica_groups is {groups}: use "
            "a multiple of it."
        )
    if least > groups:
        raise SettingsError(f"min_replica_groups is {least}, more than replica_groups ({groups}).")
    if plan.num_machines > 1:
        raise SettingsError(
            "--replica_groups starts groups only on this machine. For groups on other machines, run the "
            "command once for each group with REPLICA_GROUP_ID, NUM_REPLICA_GROUPS and --lighthouse."
        )
    words = torchrun_arguments(plan, None, "127.0.0.1", processes_per_group(plan))
    # The launcher restarts groups: if the agent did, it would keep the store of the dead processes.
    return [word for word in words if not word.startswith("--max_restarts=")]


def processes_per_group(plan: LaunchPlan) -> int:
    """Return the processes of a group: its share, at least one."""
    return max(1, plan.num_processes // plan.settings.replicas.groups)


def visible_devices(plan: LaunchPlan) -> list[dict[str, str]]:
    """Return the variable for the visible devices of each group; empty on the CPU."""
    groups, size = plan.settings.replicas.groups, processes_per_group(plan)
    ids = plan.launch.device_ids or tuple(map(str, range(plan.machine.gpus)))
    if plan.settings.process.use_cpu or len(ids) < groups * size:
        return [{} for _ in range(groups)]
    name = visible_devices_variable(plan.machine, plan.launch.distributed_type)
    return [{name: ",".join(ids[group * size :][:size])} for group in range(groups)]


class ReplicaJob:
    """The groups of a job, until all have ended.

    Args:
        plan: The plan of the job.
        line: The command line of each group.
        lighthouse: The address of the lighthouse.
    """

    def __init__(self, plan: LaunchPlan, line: Sequence[str], lighthouse: str) -> None:
        self._line, self._lighthouse, self._devices = line, lighthouse, visible_devices(plan)
        launch = plan.launch
        self._max_restarts = launch.max_restarts if plan.is_set("launch.max_restarts") else DEFAULT_RESTARTS
        self._grace = 30 if launch.shutdown_timeout is None else launch.shutdown_timeout
        self._min_groups = plan.settings.replicas.min_groups
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._restarts = dict.fromkeys(range(plan.settings.replicas.groups), 0)
        self._signal = 0
        self._has_stopped = False

    def run(self) -> int:
        """Run the groups; return 0 if groups finished, else the exit code of the group that left too few."""
        with handle_signals(("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2"), self._pass_on):
            try:
                for group in self._restarts:
                    self._start(group)
                return self._follow()
            finally:
                self._end(signal.SIGTERM)

    def _start(self, group: int) -> None:
        environ = {
            **read(),
            **self._devices[group],
            "NUM_REPLICA_GROUPS": str(len(self._restarts)),
            "REPLICA_GROUP_ID": str(group),
            "ACCELERATE_REPLICA_RESTARTS": str(self._restarts[group]),
            "TORCHFT_LIGHTHOUSE": self._lighthouse,
        }
        # In a new session: only this process forwards Ctrl-C.
        self._running[group] = subprocess.Popen(self._line, env=environ, start_new_session=True)

    def _follow(self) -> int:
        """Restart failed groups until a group has finished, and wait for the others."""
        has_finished, code = False, 0
        while self._running:
            time.sleep(_PAUSE)
            for group, process in [*self._running.items()]:
                ended = process.poll()
                if ended is None:
                    continue
                del self._running[group]
                if ended == 0:
                    has_finished = True
                elif self._has_stopped or has_finished:
                    code = code or (0 if has_finished else ended)
                elif self._restarts[group] < self._max_restarts:
                    self._restarts[group] += 1
                    say(
                        f"replica group {group} ended with {ended} and is restarting: restart "
                        f"{self._restarts[group]} of {self._max_restarts}"
                    )
                    self._start(group)
                else:
                    say(f"replica group {group} ended with {ended} and is not restarted")
                    if len(self._running) < self._min_groups:
                        code = ended
                        self._end(signal.SIGTERM)
        return 128 + self._signal if self._signal in STOP_SIGNALS else code

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        """Send a signal to all groups; after a termination signal no group is restarted."""
        del frame
        if number in STOP_SIGNALS:
            self._has_stopped, self._signal = True, self._signal or number
        for process in self._running.values():
            with suppress(ProcessLookupError):
                process.send_signal(number)

    def _end(self, number: int) -> None:
        """End the running groups, by force after the grace time."""
        self._has_stopped = True
        for process in self._running.values():
            process.send_signal(number)
        deadline = time.monotonic() + self._grace
        for process in self._running.values():
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()


_PAUSE = 0.1
"""Seconds between two polls of the groups."""
