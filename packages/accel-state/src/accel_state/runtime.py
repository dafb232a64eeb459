"""The process runtime: topology, device, collectives. Built once."""

from __future__ import annotations

import atexit
import gc
import os
from collections.abc import Mapping
from dataclasses import field, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from accel_state import collectives, hang_monitor, process_group
from accel_state import environ as process_environment
from accel_state.collectives import (
    Collectives,
    SingleCollectives,
    TorchCollectives,
    agree,
    group_timeout,
    set_group_timeout,
)
from accel_state.device_kinds import CPU, DeviceKind, get_driver_version, get_gpu_info, peer_variables
from accel_state.devices import choose_device, register_collectives, set_current_device
from accel_state.errors import AccelError, SettingsError, UnsupportedError
from accel_state.frozen import frozen
from accel_state.topology import Topology, check_first_host, detect, gloo_variables, rendezvous

if TYPE_CHECKING:
    from accel_state.settings.model import Settings


class NotStartedError(AccelError, RuntimeError):
    """The topology of this process is needed before `PartialState()` or `Accelerator()` was created."""


@frozen
class Runtime:
    """The runtime of this process.

    Args:
        backend: The process-group backend that moves the device's tensors; `None` with one process.
        debug: Whether `barrier` first checks that all ranks call it; other collectives always do.
        fork_launched: Whether this process was forked by a launcher that outlives it.
    """

    topology: Topology = field(default_factory=Topology)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    kind: DeviceKind = CPU
    collectives: Collectives = field(default_factory=SingleCollectives)
    backend: str | None = None
    debug: bool = False
    fork_launched: bool = False

    def barrier(self) -> None:
        """Wait for all ranks.

        Raises:
            DistributedOperationException: In debug mode, another rank calls another collective.
        """
        if self.debug and self.topology.world_size > 1:
            agree(self.collectives, "wait_for_everyone()")
        self.collectives.barrier()


SINGLE = Runtime()
active = SINGLE
"""The runtime of this process; a single-process CPU runtime until one is started."""

GROUP_OPTIONS = frozenset({
    "backend", "init_method", "timeout", "world_size", "rank", "store", "group_name", "pg_options",
    "device_id",
})  # fmt: skip
"""Options that `init` passes on to `torch.distributed.init_process_group`."""

NCCL_TIMEOUT = timedelta(minutes=10)
"""torch's default timeout of NCCL, which it does not apply if the group also has gloo for CPU tensors."""


def init(settings: Settings, variables: Mapping[str, str], *, cpu: bool = False, **group: Any) -> Runtime:
    """Detect topology and device of this process; with several processes, join the process group.

    An existing default process group is used unchanged.

    Raises:
        SettingsError, UnsupportedError: As in `PartialState`.
        TypeError: `group` contains an unknown option.
    """
    global active  # noqa: PLW0603 - the one runtime of a process
    unknown = sorted(set(group) - GROUP_OPTIONS)
    if unknown:
        raise TypeError(
            f"unexpected arguments {', '.join(map(repr, unknown))}: a process group accepts "
            f"{', '.join(sorted(GROUP_OPTIONS))}."
        )
    _check_timeout(group.get("timeout"))
    topology, kind, device = topology_and_device(settings, variables, cpu=cpu, **group)
    set_current_device(device)
    runtime = Runtime(
        topology=topology,
        device=device,
        kind=kind,
        debug=settings.process.debug,
        fork_launched=variables.get("FORK_LAUNCHED", "0") not in {"", "0"},
    )
    if topology.world_size > 1:
        _check_peer_access(kind, variables)
        runtime = _join(runtime, variables, group)
    active = runtime
    return runtime


def topology_and_device(
    settings: Settings, variables: Mapping[str, str], *, cpu: bool = False, **group: Any
) -> tuple[Topology, DeviceKind, torch.device]:
    """Detect topology, device kind and device of this process, without starting a runtime."""
    topology = _topology(variables, group)
    kind, device = choose_device(
        settings.process.torch_device,
        cpu=cpu or settings.process.use_cpu,
        local_rank=topology.local_rank,
        local_world_size=topology.local_world_size,
    )
    if kind.own_runtime is not None:
        topology = kind.own_runtime.topology(topology)
    return topology, kind, device


def current() -> Runtime:
    """Return the runtime of this process.

    Raises:
        NotStartedError: There is none yet.
    """
    if active is SINGLE:
        raise NotStartedError(
            "This process does not know its place yet. Make an `Accelerator()` or a `PartialState()` first."
        )
    return active


def current_topology() -> Topology:
    """Return the topology of this process, from the launcher's variables if no runtime is started."""
    if active is not SINGLE:
        return active.topology
    return _topology(process_environment.read(), {})


def reset() -> None:
    """Drop the runtime. The process group stays as it is."""
    global active  # noqa: PLW0603 - see `init`
    hang_monitor.end()
    active = SINGLE


def set_collective_timeout(timeout: timedelta) -> None:
    """Set the timeout of collectives of the default group."""
    _check_timeout(timeout)
    set_group_timeout(timeout)
    monitor = hang_monitor.active()
    if monitor is not None:
        monitor.set_limit(timeout.total_seconds())


def destroy_process_group(group: Any = None) -> None:
    """Destroy a process group (all of them if `None`); do nothing if there is none.

    While an exception is being handled, do not wait for ranks that do not respond.
    """
    if dist.is_initialized():
        if group is None:
            hang_monitor.end(closing=True)
        process_group.destroy(group)


def _check_timeout(timeout: object) -> None:
    if timeout is not None and not isinstance(timeout, timedelta):
        raise TypeError(f"timeout={timeout!r} is not a datetime.timedelta. Pass timedelta(seconds=...).")


def _check_peer_access(kind: DeviceKind, variables: Mapping[str, str]) -> None:
    if kind.name == "cuda" and (missing := peer_variables(variables)):
        names = " and ".join(f"{name}=1" for name in missing)
        raise UnsupportedError(
            f"The GPUs of this machine ({get_gpu_info()[0][0]}, driver {get_driver_version()}) cannot reach "
            f"each other's memory, and NCCL does not know: set {names}, as `accel launch` and "
            "`notebook_launcher` do, or install driver 550.40.07 or newer."
        )


def _topology(variables: Mapping[str, str], group: Mapping[str, Any]) -> Topology:
    launched = detect(variables)
    if dist.is_initialized():
        rank, world_size = dist.get_rank(), dist.get_world_size()
    elif "rank" in group and "world_size" in group:
        rank, world_size = group["rank"], group["world_size"]
    else:
        return launched
    if (rank, world_size) == (launched.rank, launched.world_size):
        return launched
    # A group created by the user, as after `torch.multiprocessing.spawn`: one node by default.
    local = int(variables.get("LOCAL_WORLD_SIZE") or world_size)
    local_rank = int(variables.get("LOCAL_RANK") or rank % local)
    return Topology(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local,
        launcher="torch.distributed",
    )


def _join(runtime: Runtime, variables: Mapping[str, str], options: Mapping[str, Any]) -> Runtime:
    topology, timeout = runtime.topology, options.get("timeout")
    # Limit threads to the node's cores per process, unless the launcher set a limit, as torchrun does.
    if topology.launcher not in {"torchrun", "torch.distributed"} and "OMP_NUM_THREADS" not in variables:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        torch.set_num_threads(max(1, cores // topology.local_world_size))
    if not dist.is_initialized():
        register_collectives(runtime.kind)
        process_environment.publish(gloo_variables(variables, topology.world_size))
        dist.init_process_group(**_group_options(runtime, variables, options))
        process_group.joined()
    elif timeout is not None:
        set_group_timeout(timeout)
    own, device = runtime.kind.own_runtime, runtime.device
    if own is None:
        ranks = collectives.in_place_of_group or TorchCollectives(device)
        joined = replace(runtime, collectives=ranks, backend=_backend_of(device))
    else:
        joined = replace(runtime, collectives=own.collectives(device), backend=runtime.kind.backend)
    store = dist.distributed_c10d._get_default_store()
    if store is not None and dist.get_backend() != "fake":  # MPI has no store; a fake group no other ranks
        hang_monitor.begin(
            store,
            rank=topology.rank,
            world_size=topology.world_size,
            limit=timeout or group_timeout(device),
            asynchronous=device.type != "cpu",
        )
    return joined


def _group_options(
    runtime: Runtime, variables: Mapping[str, str], options: Mapping[str, Any]
) -> dict[str, Any]:
    topology, kind = runtime.topology, runtime.kind
    chosen = {name: value for name, value in options.items() if value is not None}
    asked = options.get("backend")
    if asked is None or (asked == kind.backend and kind.runtime is not None):
        if kind.group_backend is None:
            raise SettingsError(
                f"There is no backend with which several processes could work on {kind.name!r} devices. "
                "Start one process, or pass cpu=True (or set ACCELERATE_USE_CPU=1)."
            )
        asked = kind.group_backend
    chosen["backend"] = asked
    if "store" not in chosen and "init_method" not in chosen and (life := _restart_prefix(variables)):
        chosen["store"] = _restart_store(life, variables, topology, chosen.get("timeout"))
    if kind.own_runtime is not None and not {"store", "init_method"} & chosen.keys():
        return {**kind.own_runtime.group_options(process_group.groups_joined()), **chosen}
    if "store" not in chosen and "init_method" not in chosen and topology.launcher != "torchrun":
        endpoint = rendezvous(variables, topology)
        check_first_host(variables, topology)
        chosen["init_method"] = f"tcp://{endpoint.address}:{endpoint.port}"
    if "init_method" in chosen or "store" in chosen:
        chosen |= {"rank": topology.rank, "world_size": topology.world_size}
    if chosen["backend"] == kind.group_backend and kind.backend == "nccl":
        chosen.setdefault("timeout", NCCL_TIMEOUT)
    return {**process_group.bound_device(chosen["backend"], runtime.device), **chosen}


def _restart_prefix(variables: Mapping[str, str]) -> str:
    """Return a key prefix unlike those of earlier groups in the agent's store; empty for the first group."""
    if variables.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return ""
    restarts, earlier = int(variables.get("TORCHELASTIC_RESTART_COUNT") or 0), process_group.groups_joined()
    return f"{restarts}.{earlier}" if earlier else str(restarts or "")


def _restart_store(
    life: str | int, variables: Mapping[str, str], topology: Topology, timeout: timedelta | None
) -> dist.Store:
    """Return a store without the keys that dead processes and earlier groups left in the agent's store.

    With a static rendezvous they outlive the processes; torch 2.15 would connect to stale addresses.
    """
    endpoint = rendezvous(variables, topology)
    wait = dist.default_pg_timeout if timeout is None else timeout
    store = dist.TCPStore(
        endpoint.address, endpoint.port, world_size=topology.world_size, is_master=False, timeout=wait
    )
    return dist.PrefixStore(f"accel/life_{life}", store)


def _backend_of(device: torch.device) -> str:
    """Return the name of the default group's backend for a device."""
    pairs = dict(pair.split(":") for pair in dist.get_backend_config().split(",") if ":" in pair)
    return pairs.get(device.type) or dist.get_backend()


def _shut_down() -> None:
    """Shut down in order: the monitor's thread, the process group, gloo's threads."""
    hang_monitor.end(closing=True)
    has_gloo = dist.is_available() and dist.is_initialized() and "gloo" in str(dist.get_backend_config())
    process_group.destroy_at_exit()
    process_group.wait_for_gloo_threads(or_unnamed=has_gloo)


atexit.register(_shut_down)


if hasattr(os, "register_at_fork"):
    # Threads are not copied by a fork: a group of the parent that is garbage would be destroyed by the first
    # collection in a data worker or a launched rank, which would wait for the group's threads forever.
    os.register_at_fork(after_in_child=gc.freeze)
