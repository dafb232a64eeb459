"""Seed random number generators, and synchronise them across ranks."""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from accel_state import runtime
from accel_state.accelerator_state import AcceleratorState
from accel_state.device_kinds import KINDS, available_kind
from accel_state.errors import SettingsError
from accel_state.frozen import frozen
from accel_state.labels import RNGType


@frozen
class RngSource:
    """One random number generator whose state can be read and set.

    Args:
        read: Returns the state, a uint8 tensor on the CPU.
        write: Sets such a state.
    """

    read: Callable[[], Tensor]
    write: Callable[[Tensor], object]


def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False) -> None:
    """Seed `random`, numpy and torch on all devices.

    Args:
        seed: An integer from 0 to 2**32 - 1.
        device_specific: Add the rank to the seed, so that every rank draws different numbers. Ranks of one
            tensor-parallel group share activations and masks of dropout: all add the rank of the first one,
            if the `Accelerator` exists already.
        deterministic: Make torch use deterministic algorithms, or raise where it has none.

    Raises:
        SettingsError: The seed is out of range.
        TypeError: The seed is not an integer.

    Example:
        >>> set_seed(7)
        >>> first = torch.rand(())
        >>> set_seed(7)
        >>> bool(torch.rand(()) == first)
        True
    """
    seed = operator.index(seed)  # accepts NumPy's integers
    if device_specific:
        group = _tensor_parallel_group()
        seed += runtime.current_topology().rank if group is None else dist.get_process_group_ranks(group)[0]
    if not 0 <= seed < 2**32:
        raise SettingsError(f"seed={seed!r} is out of range: numpy takes whole numbers from 0 to 2**32 - 1.")
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)  # seeds every device that torch itself knows
    seed_plugin = getattr(available_kind().module, "manual_seed_all", None)
    if seed_plugin is not None:
        seed_plugin(seed)
    if deterministic:
        torch.use_deterministic_algorithms(True)  # noqa: FBT003 - no keyword in older torch


def _tensor_parallel_group() -> dist.ProcessGroup | None:
    """Return the group of the ranks that draw the same numbers as this one, if the run's mesh has one."""
    mesh = AcceleratorState._shared_state.get("device_mesh")
    return mesh.get_group("tp") if mesh is not None and "tp" in (mesh.mesh_dim_names or ()) else None


def synchronize_tensor_parallel_rng() -> None:
    """Broadcast all states of the first rank of each tensor-parallel group, if there are such groups."""
    group = _tensor_parallel_group()
    if group is None:
        return
    kind = runtime.active.kind
    on_device = None if kind.type == "cpu" else kind.module.get_rng_state()
    states: list[Any] = [random.getstate(), np.random.get_state(), torch.get_rng_state(), on_device]
    dist.broadcast_object_list(states, group=group, group_src=0)
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
    if states[3] is not None:
        kind.module.set_rng_state(states[3])


def synchronize_rng_state(
    rng_type: RNGType | str | None = None, generator: torch.Generator | None = None
) -> None:
    """Broadcast rank 0's state of one generator to all ranks.

    Args:
        rng_type: The generator's type. `None` for `generator` if passed, else torch's CPU generator.
        generator: The generator, for `"generator"`.

    Raises:
        SettingsError: The type is unknown, or its device or generator is missing.

    Example:
        >>> synchronize_rng_state("torch")
    """
    default = RNGType.TORCH if generator is None else RNGType.GENERATOR
    synchronize_rng_states([default if rng_type is None else rng_type], generator)


def synchronize_rng_states(
    rng_types: Iterable[RNGType | str], generator: torch.Generator | None = None
) -> None:
    """Broadcast rank 0's states of several generators, the same on all ranks, in one message.

    Args:
        rng_types: Such as `["torch", "cuda", "generator"]`; errors are those of `synchronize_rng_state`.
        generator: The generator, for `"generator"`.
    """
    sources = [rng_source(rng_type, generator) for rng_type in rng_types]
    collectives = runtime.active.collectives
    if collectives.world_size == 1 or not sources:
        return
    states = [source.read() for source in sources]
    together = torch.cat(states)
    collectives.broadcast(together, 0)
    for source, state in zip(sources, together.split([len(state) for state in states]), strict=True):
        source.write(state.clone())


def rng_source(rng_type: RNGType | str, generator: torch.Generator | None = None) -> RngSource:
    """Return the random number generator of a type.

    Raises:
        SettingsError: The type is unknown, or its device or generator is missing.

    Example:
        >>> rng_source("torch").read().dtype
        torch.uint8
    """
    try:
        key = RNGType(rng_type)
    except ValueError:
        raise SettingsError(
            f"rng_type={rng_type!r} is not one of {', '.join(map(repr, RNGType.list()))}."
        ) from None
    if key is RNGType.TORCH:
        return RngSource(read=torch.get_rng_state, write=torch.set_rng_state)
    if key is RNGType.GENERATOR:
        if generator is None:
            raise SettingsError("rng_type='generator' needs a generator: pass it as `generator`.")
        return RngSource(read=generator.get_state, write=generator.set_state)
    rows = [row for row in KINDS if row.rng_key == key.value]
    if not any(row.probe() for row in rows):
        raise SettingsError(f"rng_type={key.value!r} was requested, but this machine has no such device.")
    return RngSource(read=rows[0].module.get_rng_state, write=rows[0].module.set_rng_state)
