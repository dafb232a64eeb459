"""The runtime module of XLA devices, in place of a `torch.xla`: PJRT through torch_xla."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from accel_state.collectives import Collectives, RecordedCollectives, ReduceOp, TorchCollectives
from accel_state.errors import MissingDependencyError, SettingsError
from accel_state.topology import Topology

_SEED_BYTES = 8


@dataclass(slots=True)
class _Use:
    """Whether the devices of this process are in use, and the last seed."""

    started: bool = False
    seed: int | None = None


_use = _Use()


@functools.cache
def library() -> Any:
    """Import torch_xla."""
    check_versions(version("torch"), version("torch_xla"))
    return import_module("torch_xla")


def check_versions(torch_version: str, xla_version: str) -> None:
    """Refuse a torch and a torch_xla that do not belong together.

    Example:
        >>> check_versions("2.9.1+cpu", "2.9.0")
    """
    torch_minor, xla_minor = (".".join(text.split(".")[:2]) for text in (torch_version, xla_version))
    if torch_minor != xla_minor:
        raise MissingDependencyError(
            f"torch {torch_version} and torch_xla {xla_version} are installed, which do not belong together: "
            f"run `pip install 'torch=={xla_minor}.*' 'torch_xla=={xla_minor}.*'`, or pass cpu=True (or set "
            "ACCELERATE_USE_CPU=1) to compute on the CPU."
        )


def topology(launched: Topology) -> Topology:
    """Return PJRT's topology: one rank per device, or one per host without a launcher.

    Raises:
        SettingsError: The launcher's topology differs; or torch_xla runs ranks as threads of one process.
    """
    library()
    runtime = import_module("torch_xla.runtime")
    ranks = runtime.world_size()
    if ranks == 1:
        known = Topology(rank=runtime.process_index(), world_size=runtime.process_count())
    elif ranks > runtime.process_count():
        raise SettingsError(
            f"torch_xla runs {ranks} ranks in {runtime.process_count()} processes, as threads, which TPU v2 "
            "and v3 need. State is kept by process here: use one process for all devices, with "
            "FullyShardedDataParallelPlugin(xla=True, xla_fsdp_v2=True)."
        )
    else:
        known = Topology(
            rank=runtime.global_ordinal(),
            world_size=ranks,
            local_rank=runtime.local_ordinal(),
            local_world_size=runtime.local_process_count(),
            launcher="torch_xla",
        )
    if launched.world_size not in {1, known.world_size}:
        raise SettingsError(
            f"{launched.launcher} started {launched.world_size} processes, and PJRT (PJRT_DEVICE="
            f"{runtime.device_type()}) reports {known.world_size}: XLA devices need processes started "
            "by torch_xla, as with `accel launch --tpu`. Pass cpu=True to compute on the CPU."
        )
    return known


def group_options(earlier: int) -> dict[str, Any]:
    """Return store, rank and world size of a process group of the host, as PJRT knows them.

    Args:
        earlier: Number of groups that this process has joined before: their keys stay in the store.
    """
    library()
    import_module("torch_xla.distributed.xla_backend")  # registers "xla://"
    if not is_replicated() and import_module("torch_xla.runtime").process_count() > 1:
        start(spmd=True)  # then PJRT counts processes, not devices
    store, rank, world_size = next(rendezvous("xla://"))
    life = dist.PrefixStore(f"accel/{earlier}", store)
    return {"store": life, "rank": rank, "world_size": world_size}


def collectives(device: torch.device) -> Collectives:
    """Return the collectives of the device, on top of the process group of the hosts."""
    if is_replicated():
        return RecordedCollectives(device, sys.modules[__name__])
    return TorchCollectives(torch.device("cpu"))


def all_gather(tensor: Tensor) -> Tensor:
    """All-gather one-dimensional tensors: there is no layout to agree on."""
    return import_module("torch_xla.core.xla_model").all_gather(tensor, pin_layout=False)


def all_reduce(tensor: Tensor, op: ReduceOp) -> Tensor:
    """All-reduce a tensor."""
    return import_module("torch_xla.core.xla_model").all_reduce("mul" if op == "prod" else op, tensor)


def broadcast(tensor: Tensor, *, is_source: bool) -> Tensor:
    """Broadcast the tensor of the source rank: an all-reduce to which all others add zeros.

    The source rank is data, so that all ranks record the same program. (torch_xla's `collective_broadcast`
    multiplies by zero, which turns infinite values of other ranks into NaN.)
    """
    (flag,) = send([torch.tensor(is_source, device="cpu")], tensor.device)
    return all_reduce(torch.where(flag, tensor, torch.zeros_like(tensor)), "sum")


def send(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Start to copy CPU tensors to a device, all at once."""
    return import_module("torch_xla.core.xla_model").send_cpu_data_to_device([*tensors], device)


def run_on_each_device(
    function: Callable[..., Any], args: Sequence[Any], count: int | None
) -> dict[int, Any]:
    """Fork one process per device of this machine, and run a function in each.

    Args:
        function: Any function, also one of a notebook or of a local scope. Its result is pickled.
        args: The arguments of the function.
        count: The number of devices that the caller expects; `None` for any.

    Returns:
        The results by rank.

    Raises:
        SettingsError: The number of devices differs.
    """
    library()
    _inherited[:] = [(function, args, count)]
    try:
        return import_module("torch_xla._internal.pjrt").run_multiprocess(_run_inherited, start_method="fork")
    finally:
        _inherited.clear()


_inherited: list[tuple[Callable[..., Any], Sequence[Any], int | None]] = []
"""The function that forked processes run: inherited, as functions of a local scope cannot be pickled."""


def _run_inherited() -> Any:
    ((function, args, count),) = _inherited
    world_size = import_module("torch_xla.runtime").world_size()
    if count not in {None, world_size}:
        raise SettingsError(
            f"notebook_launcher(num_processes={count!r}): PJRT runs {world_size}, one for each device. "
            "Remove num_processes, or pass 1 for one process that drives all devices."
        )
    return function(*args)


def is_replicated() -> bool:
    """Return whether there is a rank per device, rather than one process for all devices of a host."""
    return library()._XLAC._xla_get_replication_devices_count() > 0


def is_global() -> bool:
    """Return whether tensors are global, that is, sharded by the compiler over several hosts."""
    runtime = import_module("torch_xla.runtime")
    return runtime.is_spmd() and runtime.process_count() > 1


def flush() -> None:
    """Execute the operations recorded since the last flush, without waiting for the end."""
    library().sync()


def synchronize(device: torch.device | None = None) -> None:
    """Execute the operations recorded on every device of the process, and wait until they are done."""
    del device
    library().sync(wait=True)
    import_module("torch_xla.core.xla_model").wait_device_ops()


def device_count() -> int:
    """Return the number of devices that this process drives: one, which under SPMD is a mesh of devices."""
    return 1


def current_device() -> int:
    """Return the index of the device of this process."""
    return 0


def is_initialized() -> bool:
    """Return whether this process has started to use its devices."""
    return _use.started


def start(*, spmd: bool) -> None:
    """Initialise the devices of this process, with the seed set before.

    Args:
        spmd: Whether one virtual device represents all devices, over which the compiler shards (SPMD).

    Raises:
        SettingsError: SPMD is requested after a tensor was moved to a device without it.
    """
    extension, runtime = library()._XLAC, import_module("torch_xla.runtime")
    if spmd and not runtime.is_spmd():
        if extension._xla_get_spmd_config_is_locked():
            raise SettingsError(
                "An XLA device was used in this process before sharding by the compiler (SPMD) began: "
                "make the Accelerator before any tensor is moved to the device."
            )
        runtime.use_spmd()
    _use.started = True
    if _use.seed is not None:
        library().manual_seed(_use.seed)


def manual_seed_all(seed: int) -> None:
    """Seed the device's generator; before `start` the seed is only stored, and no device is used."""
    _use.seed = seed
    if _use.started:
        library().manual_seed(seed)


def get_rng_state() -> Tensor:
    """Return the seed of the device's generator as 8 bytes."""
    library()
    seed = import_module("torch_xla.core.xla_model").get_rng_state()
    return torch.frombuffer(bytearray(seed.to_bytes(_SEED_BYTES, sys.byteorder)), dtype=torch.uint8)


def set_rng_state(state: Tensor) -> None:
    """Set the seed of the device's generator."""
    manual_seed_all(int.from_bytes(state.numpy().tobytes(), sys.byteorder))
