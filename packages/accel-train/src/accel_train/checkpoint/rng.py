"""The random number generators of a rank: of Python, numpy, torch, and every kind of device in use."""

from __future__ import annotations

import hashlib
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from accel_state.devices.kinds import KINDS, DeviceKind

if TYPE_CHECKING:
    from collections.abc import Mapping

PYTHON_KEY = "random_state"
NUMPY_KEY = "numpy_random_seed"
TORCH_KEY = "torch_manual_seed"
ENGINE_KEY = "engine_random_state"
"""Of generators that a strategy keeps beside these."""
_HOST_KEYS = (PYTHON_KEY, NUMPY_KEY, TORCH_KEY)


def read_rng(device: torch.device) -> dict[str, Any]:
    """Return the states of all generators, of devices in use, too, in the usual format of checkpoints.

    Example:
        >>> sorted(read_rng(torch.device("cpu")))
        ['numpy_random_seed', 'random_state', 'torch_manual_seed']
    """
    states: dict[str, Any] = {
        PYTHON_KEY: random.getstate(),
        NUMPY_KEY: np.random.get_state(),
        TORCH_KEY: torch.get_rng_state(),
    }
    for kind in _kinds_in_use(device):
        states[_device_key(kind)] = _read_device(kind)
    return states


def write_rng(states: Mapping[str, Any], device: torch.device) -> list[str]:
    """Set all generators; return one sentence for each that could not be restored."""
    complaints = [f"{key!r} is absent" for key in _HOST_KEYS if key not in states]
    if PYTHON_KEY in states:
        version, words, gauss = states[PYTHON_KEY]
        random.setstate((version, tuple(words), gauss))
    if NUMPY_KEY in states:
        np.random.set_state(states[NUMPY_KEY])
    if TORCH_KEY in states:
        torch.set_rng_state(states[TORCH_KEY])
    present = _kinds_in_use(device)
    for kind in present:
        key = _device_key(kind)
        if key in states:
            complaints += _write_device(kind, states[key])
        else:
            complaints.append(f"{key!r} is absent: the state was saved where there was no such device")
    known = {*_HOST_KEYS, *map(_device_key, present), "step", ENGINE_KEY}
    complaints += [f"{key!r} is for devices that are not here" for key in sorted(states) if key not in known]
    return complaints


def seed_apart(states: Mapping[str, Any], rank: int) -> None:
    """Seed all generators of a rank without saved states, as a function of those of another."""
    torch_state = states.get(TORCH_KEY)
    source = b"" if torch_state is None else torch_state.numpy().tobytes()
    digest = hashlib.blake2b(source + str(rank).encode(), digest_size=8).digest()
    seed = int.from_bytes(digest, "little") >> 1
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)  # of all devices


def _kinds_in_use(device: torch.device) -> list[DeviceKind]:
    """Return the kinds of devices in use: this process's own, and others that are initialised."""
    by_type = {kind.type: kind for kind in reversed(KINDS) if kind.type != "cpu" and kind.probe()}
    return [
        kind
        for kind in reversed(by_type.values())
        if kind.type == device.type or getattr(kind.module, "is_initialized", bool)()
    ]


def _device_key(kind: DeviceKind) -> str:
    return f"torch_{kind.type}_manual_seed"


def _read_device(kind: DeviceKind) -> Any:
    if not hasattr(kind.module, "get_rng_state_all"):  # mps and xla have one device
        return [kind.module.get_rng_state()]
    return kind.module.get_rng_state_all()


def _write_device(kind: DeviceKind, states: Any) -> list[str]:
    namespace = kind.module
    if not hasattr(namespace, "get_rng_state_all"):
        namespace.set_rng_state(states[0])
        return []
    count = namespace.device_count()
    for index, state in enumerate(states[:count]):
        namespace.set_rng_state(state, index)
    if len(states) == count:
        return []
    return [f"{_device_key(kind)!r} holds states of {len(states)} devices, and there are {count}"]
