"""Synchronise the shuffle order of samplers across ranks."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from accel_ops.collect import broadcast_object_list
from accel_state.labels import RNGType
from accel_train.data.samplers import SeedableRandomSampler, innermost_sampler

if TYPE_CHECKING:
    from collections.abc import Iterable

_RANDOM = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedOrder:
    """An order of samples that is the same on all ranks."""

    rng_types: tuple[RNGType, ...] = ()
    generator: torch.Generator | None = None
    indices: Any = None
    batched: bool = True

    def options(self) -> dict[str, Any]:
        """Return the argument of a torch loader that says what it reads."""
        if self.indices is None:
            return {}
        return {"batch_sampler" if self.batched else "sampler": self.indices}


def sync_shuffle(
    indices: Any,
    *,
    batched: bool,
    num_processes: int,
    rng_types: Iterable[str | RNGType],
    seedable: bool,
    seed: int | None,
) -> SharedOrder:
    """Make an order the same on all ranks; the given samplers are not changed."""
    types = [RNGType(kind) for kind in rng_types]
    found: Any = innermost_sampler(indices)
    sampler: Any = found
    if seedable and type(found) is RandomSampler:
        sampler = _seedable(found, seed, num_processes)
    elif num_processes > 1 and isinstance(found, _RANDOM) and not isinstance(found, SeedableRandomSampler):
        if found.generator is None and RNGType.TORCH not in types:
            sampler = copy(found)
            # It starts from torch's own, so that `set_seed` decides about it.
            seed_drawn = int(torch.empty((), dtype=torch.int64).random_().item())
            sampler.generator = torch.Generator().manual_seed(seed_drawn)
        if sampler.generator is not None:
            types.append(RNGType.GENERATOR)
    generator = getattr(sampler, "generator", None)
    if not isinstance(generator, torch.Generator) or isinstance(sampler, SeedableRandomSampler):
        generator = None
    used = (kind for kind in dict.fromkeys(types) if generator is not None or kind is not RNGType.GENERATOR)
    return SharedOrder(
        rng_types=tuple(used),
        generator=generator,
        indices=_replaced(indices, found, sampler),
        batched=batched,
    )


def _seedable(sampler: RandomSampler, seed: int | None, num_processes: int) -> SeedableRandomSampler:
    generator: torch.Generator | None = sampler.generator
    if seed is None:
        drawn = [torch.initial_seed()]
        if num_processes > 1:
            broadcast_object_list(drawn)
        seed = drawn[0]
    return SeedableRandomSampler(
        sampler.data_source,
        replacement=sampler.replacement,
        num_samples=sampler._num_samples,  # pyright: ignore[reportPrivateUsage]
        generator=generator,
        data_seed=seed,
    )


def _replaced(indices: Any, old: object, new: object) -> Any:
    """The same samplers around another innermost one."""
    if indices is old:
        return new
    if old is new:
        return indices
    around = copy(indices)
    below = "batch_sampler" if hasattr(indices, "batch_sampler") else "sampler"
    setattr(around, below, _replaced(getattr(indices, below), old, new))
    return around
