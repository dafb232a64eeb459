"""Which device a process computes on."""

from __future__ import annotations

import torch

from accel_state.devices.kinds import CPU, KINDS, DeviceKind, available_kind, kind_of
from accel_state.errors import SettingsError

_UNNUMBERED = frozenset({"cpu", "mps", "xla"})


def choose_device(name: str | None, *, cpu: bool, local_rank: int) -> tuple[DeviceKind, torch.device]:
    """Find the device of this process.

    Args:
        name: A device asked for by name, such as `"cuda:1"` or `"xpu"`; without an index the local rank
            gives it. `None` for the best that is there.
        cpu: Whether the CPU was asked for, whatever else is there.
        local_rank: This process among those of its machine, from 0.

    Raises:
        SettingsError: The name is no device that torch knows, or there are fewer devices than processes.

    Example:
        >>> choose_device(None, cpu=True, local_rank=3)[1]
        device(type='cpu')
    """
    if cpu:
        return CPU, torch.device("cpu")
    if name is None:
        kind = available_kind()
        return kind, default_device(kind, local_rank)
    for row in KINDS:
        if row.type == name.partition(":")[0]:
            row.probe()  # torch knows some types only once their plugin is there
    try:
        device = torch.device(name)
        kind = kind_of(device)
    except (RuntimeError, ValueError) as error:
        raise SettingsError(f"ACCELERATE_TORCH_DEVICE={name!r} is not a device: {error}") from None
    return kind, default_device(kind, local_rank) if device.index is None else device


def default_device(kind: DeviceKind, local_rank: int) -> torch.device:
    """The device of a family for one of the processes of a machine.

    Args:
        kind: The family.
        local_rank: This process among those of its machine, from 0.

    Returns:
        A device with an index, where the family numbers its devices; then the one that the caller has
        made current already, if this process is the only one.

    Raises:
        SettingsError: There are fewer devices than processes.
    """
    namespace = kind.module
    if kind.type in _UNNUMBERED or namespace is None:
        return torch.device(kind.type)
    count = namespace.device_count()
    if local_rank == 0:
        initialised = getattr(namespace, "is_initialized", bool)()
        return torch.device(kind.type, namespace.current_device() if initialised else 0)
    if count <= 1:  # each process sees only its own, as under Slurm with one GPU per task
        return torch.device(kind.type, 0)
    if local_rank >= count:
        raise SettingsError(
            f"The process with local rank {local_rank} has no device: this machine shows {count} "
            f"{kind.name} devices ({kind.visible_devices_env} restricts which). "
            f"Start at most {count} processes per machine."
        )
    return torch.device(kind.type, local_rank)


def make_current(device: torch.device) -> None:
    """Make a device the current one of its family, so that kernels and collectives of this process use it.

    Args:
        device: Any device; one of a family without numbers is left alone.
    """
    set_device = getattr(kind_of(device).module, "set_device", None)
    if device.index is not None and device.type not in _UNNUMBERED and set_device is not None:
        set_device(device)
