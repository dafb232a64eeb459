"""A launch: what is requested, on which machine, and what is decided."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from accel_cli.launch.hosts import VISIBLE_DEVICES, HostDevices
from accel_state.frozen import frozen
from accel_state.settings import LaunchSettings, Merged, Settings, SourcedValue
from accel_state.topology import detect, is_launched

if TYPE_CHECKING:
    from accel_cli.launch.launchers import Launcher


@frozen
class LaunchPlan:
    """A launch.

    Args:
        merged: All settings, with their sources.
        machine: The properties of this machine.
        environ: The variables of this command; in the plan that is run, all variables of each worker.
        script: The script to run.
        script_arguments: The words after it, unchanged.
        launcher: The launcher, once it is chosen.
    """

    merged: Merged
    machine: HostDevices
    environ: Mapping[str, str]
    script: str = ""
    script_arguments: tuple[str, ...] = ()
    launcher: Launcher | None = None

    @property
    def settings(self) -> Settings:
        """Return the settings without their sources."""
        return self.merged.settings

    @property
    def launch(self) -> LaunchSettings:
        """Return the settings of the launch, with the numbers of processes and nodes resolved."""
        return replace(self.settings.launch, num_processes=self.num_processes, num_machines=self.num_machines)

    @property
    def num_processes(self) -> int:
        """Return the world size: the requested number of processes, else one process per device."""
        launch = self.settings.launch
        if self.is_worker:
            return detect(self.environ).world_size
        if launch.num_processes is not None:
            return launch.num_processes
        if self.machine.hosts and self.reaches_hosts:
            return sum(self.machine.hosts.values())
        if self.source_of("launch.distributed_type").value == "NO":
            return 1
        if self.remote:
            return launch.num_machines * (self.settings.cluster.gpus_per_node or 1)
        devices = 1 if uses_cpu(self.merged) else len(launch.device_ids) or max(1, self.machine.gpus)
        return launch.num_machines * devices

    @property
    def num_machines(self) -> int:
        """Return the number of nodes, from the hostfile if DeepSpeed's launcher or mpirun is used."""
        if self.reaches_hosts and self.machine.hosts:
            return len(self.machine.hosts)
        if self.machine.mpi_machines and self.source_of("launch.num_machines").value is None:
            return len(self.machine.mpi_machines)
        return self.settings.launch.num_machines

    @property
    def local_processes(self) -> int:
        """Return the number of processes on this node."""
        return self.num_processes // self.num_machines

    @property
    def row(self) -> Launcher:
        """Return the launcher of a plan that is made."""
        assert self.launcher is not None  # noqa: S101 - `make_plan` has chosen it
        return self.launcher

    @property
    def remote(self) -> bool:
        """Return whether the launcher starts processes on other machines."""
        return self.launcher is not None and self.launcher.remote

    @property
    def is_local(self) -> bool:
        """Return whether processes are started on this machine and use its devices."""
        launch = self.settings.launch
        return launch.compute_environment == "LOCAL_MACHINE" and not launch.on_tpu and not self.remote

    @property
    def is_worker(self) -> bool:
        """Return whether this command is itself one of several processes of a node, started by a launcher."""
        return is_launched(self.environ)

    @property
    def reaches_hosts(self) -> bool:
        """Return whether DeepSpeed's launcher starts the processes of all nodes."""
        hosts = self.settings.hosts
        return (
            self.settings.deepspeed is not None
            and (hosts.launcher or "pdsh") != "standard"
            and bool(hosts.hostfile)
        )

    def source_of(self, path: str) -> SourcedValue:
        """Return the source of a setting."""
        return self.merged.source_of(path)

    def origin(self, path: str) -> str:
        """Return the source of a setting as shown in messages."""
        return self.source_of(path).origin

    def is_set(self, path: str) -> bool:
        """Return whether a setting has a source other than the defaults."""
        return self.source_of(path).value is not None


def uses_cpu(merged: Merged) -> bool:
    """Return whether to use the CPU; of `use_cpu` and `distributed_type` the source with precedence wins."""
    switch, kind = merged.source_of("process.use_cpu"), merged.source_of("launch.distributed_type")
    value = merged.settings.process.use_cpu
    if kind.value == "MULTI_CPU":
        return value or kind.layer < switch.layer or switch.value is None
    if value and kind.value in VISIBLE_DEVICES:
        return switch.layer < kind.layer
    return value
