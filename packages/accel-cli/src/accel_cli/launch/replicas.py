"""Run replica groups on this machine: torchft's lighthouse, and an elastic agent per group.

A failed group is restarted while the others continue. The launcher logs these events.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from types import FrameType
from typing import TYPE_CHECKING, Any

from accel_cli.launch.hosts import visible_devices_variable
from accel_cli.launch.launchers import (
    STOP_SIGNALS,
    Command,
    handle_signals,
    require_script,
    say,
    torchrun_arguments,
)
from accel_state.environ import read
from accel_state.errors import SettingsError

if TYPE_CHECKING:
    from accel_cli.launch.command import LaunchPlan

DEFAULT_RESTARTS = 3
"""Default number of restarts of a group, without --max_restarts."""


def replicas_command(plan: LaunchPlan) -> Command:
    """Return this module, with the job as JSON, as the program.

    Raises:
        SettingsError: Groups would differ in size, or there are fewer groups than required.
    """
    require_script(plan)
    settings, launch = plan.merged.settings.replicas, plan.launch
    total, groups = launch.num_processes or 1, settings.groups
    is_counted = plan.merged.source_of("launch.num_processes").value is None
    per_group = 1 if is_counted and total < groups else total // groups
    if per_group * groups != total and not (is_counted and total < groups):
        raise SettingsError(
            f"num_processes is {total}, the total over all groups, and replica_groups is {groups}: use "
            "a multiple of it."
        )
    if settings.min_groups > groups:
        raise SettingsError(
            f"min_replica_groups is {settings.min_groups}, more than replica_groups ({groups})."
        )
    if launch.num_machines > 1:
        raise SettingsError(
            "--replica_groups starts groups only on this machine. For groups on other machines, run the "
            "command once for each group with REPLICA_GROUP_ID, NUM_REPLICA_GROUPS and --lighthouse."
        )
    launch_of_group = replace(launch, num_processes=per_group, main_process_port=None)
    # The launcher restarts groups: if the agent did, it would keep the store of the dead processes.
    line = [
        word
        for word in torchrun_arguments(replace(plan, launch=launch_of_group), None, "127.0.0.1")
        if not word.startswith("--max_restarts=")
    ]
    restarts = launch.max_restarts
    job = {
        "groups": groups,
        "min_groups": settings.min_groups,
        "timeout": settings.timeout,
        "lighthouse": settings.lighthouse,
        "host": launch.main_process_ip or "127.0.0.1",
        "port": launch.main_process_port or 0,
        "max_restarts": DEFAULT_RESTARTS
        if plan.merged.source_of("launch.max_restarts").value is None
        else restarts,
        "grace": 30 if launch.shutdown_timeout is None else launch.shutdown_timeout,
        "devices": _devices(plan, per_group),
        "command": [*(["--quiet"] if launch.quiet else []), *line],
    }
    return Command(
        command=(sys.executable, "-m", "accel_cli.launch.replicas", json.dumps(job)),
        environ={"RUST_LOG": "warn", **plan.environ},  # torchft writes ten lines per step otherwise
    )


def _devices(plan: LaunchPlan, per_group: int) -> list[dict[str, str]]:
    """Return the variable for the visible devices of each group; empty on the CPU."""
    groups, settings = plan.merged.settings.replicas.groups, plan.merged.settings
    ids = plan.launch.device_ids or tuple(map(str, range(plan.machine.gpus)))
    if settings.process.use_cpu or len(ids) < groups * per_group:
        return [{} for _ in range(groups)]
    name = visible_devices_variable(plan.machine, plan.launch.distributed_type)
    return [{name: ",".join(ids[group * per_group :][:per_group])} for group in range(groups)]


class ReplicaJob:
    """The groups of a job, until all have ended.

    Args:
        job: The job data of `replicas_command`.
        lighthouse: The address of the lighthouse.
    """

    def __init__(self, job: Mapping[str, Any], lighthouse: str) -> None:
        self._job = job
        self._lighthouse = lighthouse
        self.line = [sys.executable, "-m", "accel_cli.launch.elastic", *job["command"]]
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._restarts = dict.fromkeys(range(job["groups"]), 0)
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
            **self._job["devices"][group],
            "NUM_REPLICA_GROUPS": str(self._job["groups"]),
            "REPLICA_GROUP_ID": str(group),
            "ACCELERATE_REPLICA_RESTARTS": str(self._restarts[group]),
            "TORCHFT_LIGHTHOUSE": self._lighthouse,
        }
        # In a new session: only this process forwards Ctrl-C.
        self._running[group] = subprocess.Popen(self.line, env=environ, start_new_session=True)

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
                elif self._restarts[group] < self._job["max_restarts"]:
                    self._restarts[group] += 1
                    say(
                        f"replica group {group} ended with {ended} and is restarting: restart "
                        f"{self._restarts[group]} of {self._job['max_restarts']}"
                    )
                    self._start(group)
                else:
                    say(f"replica group {group} ended with {ended} and is not restarted")
                    if len(self._running) < self._job["min_groups"]:
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
        deadline = time.monotonic() + self._job["grace"]
        for process in self._running.values():
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()


_PAUSE = 0.1
"""Seconds between two polls of the groups."""


def main(arguments: Sequence[str]) -> int:
    """Start the lighthouse, unless one is running, and run the groups.

    Args:
        arguments: The job as JSON.

    Returns:
        The exit code of the job.
    """
    job = json.loads(arguments[0])
    if job["lighthouse"] is not None:
        return ReplicaJob(job, job["lighthouse"]).run()
    server = import_module("torchft.coordination").LighthouseServer(
        bind=f"{job['host']}:{job['port']}",
        min_replicas=job["min_groups"],
        join_timeout_ms=10_000,
        quorum_tick_ms=100,
        heartbeat_timeout_ms=1000 * job["timeout"],
    )
    port = server.address().rpartition(":")[2]
    try:
        return ReplicaJob(job, f"http://{job['host']}:{port}").run()
    finally:
        server.shutdown()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
