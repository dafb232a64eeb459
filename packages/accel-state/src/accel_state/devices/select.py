"""Choose the device that a process computes on."""

from __future__ import annotations

import functools
import logging

import torch

from accel_state.devices.kinds import CPU, KINDS, DeviceKind, available_kind, kind_of
from accel_state.errors import SettingsError
from accel_state.versions import is_torch_version

logger = logging.getLogger(__name__)

SINGLE_DEVICE_TYPES = frozenset({"cpu", "mps"})


def choose_device(
    name: str | None, *, cpu: bool, local_rank: int, local_world_size: int
) -> tuple[DeviceKind, torch.device]:
    """Find the device of this process.

    Args:
        name: A device asked for by name, such as `"cuda:1"` or `"xpu"`; without an index the local rank
            gives it. `None` for the best that is there.
        cpu: Whether the CPU was asked for, whatever else is there.
        local_rank: Local rank of this process.
        local_world_size: Number of processes on this node.

    Raises:
        SettingsError: The name is no device that torch knows, or there are fewer devices than processes.

    Example:
        >>> choose_device(None, cpu=True, local_rank=3, local_world_size=4)[1]
        device(type='cpu')
    """
    if cpu:
        return CPU, torch.device("cpu")
    if name is None:
        kind = available_kind()
        if kind is CPU:
            _warn_of_unknown_device()
        _warn_of_old_torch(kind)
        return kind, default_device(kind, local_rank, local_world_size)
    for row in KINDS:
        if row.type == name.partition(":")[0]:
            row.probe()  # torch knows some types only once their plugin is there
    try:
        device = torch.device(name)
        kind = kind_of(device)
    except (RuntimeError, ValueError) as error:
        raise SettingsError(f"ACCELERATE_TORCH_DEVICE={name!r} is not a device: {error}") from None
    _warn_of_old_torch(kind)
    if device.index is None:
        device = default_device(kind, local_rank, local_world_size)
    return kind, device


def default_device(kind: DeviceKind, local_rank: int, local_world_size: int) -> torch.device:
    """The device of a family for one of the processes of a machine.

    Returns:
        A device with an index, where the family numbers its devices: that of the local rank, or the one that
        the caller has made current already if this process is the only one on its node.

    Raises:
        SettingsError: There are fewer devices than processes.
    """
    namespace = kind.module
    if kind.type in SINGLE_DEVICE_TYPES or namespace is None:
        return torch.device(kind.type)
    count = namespace.device_count()
    if local_world_size == 1 and getattr(namespace, "is_initialized", bool)():
        return torch.device(kind.type, namespace.current_device())
    if count <= 1:  # each process sees only its own, as under Slurm with one GPU per task
        return torch.device(kind.type, 0)
    if local_rank >= count:
        raise SettingsError(
            f"The process with local rank {local_rank} has no device: this machine shows {count} "
            f"{kind.name} devices ({kind.visible_devices_env} restricts which). "
            f"Start at most {count} processes per machine."
        )
    return torch.device(kind.type, local_rank)


def set_current_device(device: torch.device) -> None:
    """Make a device the current one of its family; leave one of a family without numbers alone."""
    set_device = getattr(kind_of(device).module, "set_device", None)
    if device.index is not None and device.type not in SINGLE_DEVICE_TYPES and set_device is not None:
        set_device(device)


@functools.cache
def _warn_of_old_torch(kind: DeviceKind) -> None:
    """Warn, once, that torch is older than what devices of a family need."""
    if kind.least_torch is not None and is_torch_version("<", kind.least_torch):
        logger.warning(
            "torch %s is installed; on %s devices accel needs torch %s or newer. Training may work, but "
            "copies on streams of their own and groups of some of the ranks can fail: install 'torch>=%s'.",
            *(torch.__version__, kind.name, kind.least_torch, kind.least_torch),
        )


@functools.cache
def _warn_of_unknown_device() -> None:
    """Warn, once, that torch can use an accelerator that no family has."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if found is not None and all(found.type != kind.type for kind in KINDS):
        logger.warning(
            "PyTorch can use a device of type %r, which accel does not know: this process computes on the "
            "CPU (cpu=True says that this is meant).",
            found.type,
        )
