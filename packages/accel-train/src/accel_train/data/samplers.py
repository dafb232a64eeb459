"""Order of an epoch: seedable samplers, recording and replaying an order, sharing it across ranks."""

from __future__ import annotations

import random
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from itertools import chain
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from accel_ops.collectives import broadcast_object_list
from accel_state.labels import RNGType

OrderState: TypeAlias = dict[str, Any]
"""The state that replays the order of an epoch: `{"seed", "epoch"}`, `{"generator"}`, `{"torch"}` or nothing.

Torch's samplers draw the same order from the same state of a generator, on any number of ranks.
"""


KEYED_FROM = 1 << 26
"""Number of samples from which an order is computed where it is read: a list of 10⁹ has 8 GB on each rank."""
_ROUNDS = 6
_CHUNK = 8192


def permute(positions: np.ndarray[Any, Any], size: int, key: Sequence[int]) -> np.ndarray[Any, Any]:
    """Return the items at some positions of a random order, in memory and time of these positions alone.

    A Feistel network, whose rounds mix half of the bits as splitmix64 does, permutes the numbers of an even
    number of bits; results outside the order are permuted again until they are inside ("cycle walking":
    Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002), fewer than four times on average.

    Args:
        positions: Integers from 0 to `size - 1`, of any shape.
        size: Length of the order.
        key: Non-negative integers that determine the order.

    Returns:
        Integers of type `uint64`, from 0 to `size - 1`: each once if the positions are all.

    Example:
        >>> sorted(permute(np.arange(5), 5, [0]).tolist())
        [0, 1, 2, 3, 4]
    """
    bits = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    mask = (np.uint64(1) << bits) - np.uint64(1)
    keys = np.random.SeedSequence(key).generate_state(_ROUNDS, np.uint64)
    items = positions.astype(np.uint64)
    walking = np.ones(items.shape, dtype=bool)
    while walking.any():
        left, right = items[walking] >> bits, items[walking] & mask
        for round_key in keys:
            mixed = right + round_key
            mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            left, right = right, left ^ ((mixed ^ (mixed >> np.uint64(31))) & mask)
        items[walking] = (left << bits) | right
        walking = items >= np.uint64(size)
    return items


class SeedableRandomSampler(RandomSampler):
    """Shuffle in an order that depends only on a seed and the epoch.

    The order of epoch `e` is that of a `RandomSampler` with a generator seeded with `seed + e`: the same on
    every rank, in every process. From 2²⁶ samples on, it is that of `permute` instead, which takes no memory,
    and no time to seek. A complete iteration ends the epoch, unless `set_epoch` is called during it.

    Args:
        *args: As for `torch.utils.data.RandomSampler`; `generator` is not used.
        **kwargs: As for `torch.utils.data.RandomSampler`, and `data_seed`, the seed; by default that of
            torch's default generator.

    Example:
        >>> sampler = SeedableRandomSampler(range(5), data_seed=1)
        >>> first, second = list(sampler), list(sampler)
        >>> first == second, sampler.epoch
        (False, 2)
        >>> sampler.set_epoch(0)
        >>> list(sampler) == first
        True
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        seed: int | None = kwargs.pop("data_seed", None)
        super().__init__(*args, **kwargs)
        self.initial_seed: int = torch.initial_seed() if seed is None else seed
        self.epoch: int = 0

    def __iter__(self) -> Iterator[int]:
        """Yield the indices of the current epoch, then begin the next epoch."""
        epoch = self.epoch
        yield from self.iterate_from(0)
        self.end_epoch(epoch)

    def end_epoch(self, epoch: int) -> None:
        """Begin the next epoch, unless `set_epoch` has set another one meanwhile.

        Args:
            epoch: The epoch that has ended.
        """
        if self.epoch == epoch:
            self.epoch = epoch + 1

    def set_epoch(self, epoch: int) -> None:
        """Set the next epoch.

        Args:
            epoch: Any number; loaders count from 0.
        """
        self.epoch = epoch

    def iterate_from(self, position: int) -> Iterator[int]:
        """Yield the indices of the current epoch from a position on; a list of all is never built."""
        if is_keyed(self):
            return self._permuted_from(position)
        generator = torch.Generator().manual_seed(self.initial_seed + self.epoch)
        size = len(self.data_source)
        if self.replacement:  # RandomSampler draws in chunks of 32: keep its order
            draws = [32] * (self.num_samples // 32) + [self.num_samples % 32]
            parts = [torch.randint(size, (n,), generator=generator, device="cpu") for n in draws]
        else:
            rounds = range(-(-self.num_samples // size))
            parts = [torch.randperm(size, generator=generator, device="cpu") for _ in rounds]
        order = torch.cat(parts)[: self.num_samples]
        return chain.from_iterable(part.tolist() for part in order[position:].split(8192))

    def _permuted_from(self, position: int) -> Iterator[int]:
        size, seed = len(self.data_source), (self.initial_seed + self.epoch) % (1 << 64)
        while position < self.num_samples:
            lap, start = divmod(position, size)
            stop = min(start + _CHUNK, size, start + self.num_samples - position)
            yield from permute(np.arange(start, stop), size, [seed, lap]).tolist()
            position += stop - start


def is_keyed(sampler: object) -> bool:
    """Return whether the order is one of `permute`: torch's, without replacement, of 2²⁶ samples or more."""
    if not isinstance(sampler, RandomSampler) or type(sampler) not in {RandomSampler, SeedableRandomSampler}:
        return False
    return not sampler.replacement and len(sampler.data_source) >= KEYED_FROM


def innermost_sampler(sampler: object) -> object:
    """Find the sampler of indices below any number of batch samplers."""
    while (below := getattr(sampler, "batch_sampler", getattr(sampler, "sampler", None))) is not None:
        sampler = below
    return sampler


def replace_sampler(batch_sampler: Any, sampler: Any) -> None:
    """Replace the sampler of indices below any number of batch samplers.

    Raises:
        ValueError: There is no such sampler.
    """
    while (below := getattr(batch_sampler, "batch_sampler", None)) is not None:
        batch_sampler = below
    if getattr(batch_sampler, "sampler", None) is None:
        raise ValueError(f"{batch_sampler!r} has no sampler to replace with {sampler!r}.")
    batch_sampler.sampler = sampler


def is_plain_batch_sampler(batch_sampler: object) -> bool:
    """Return whether batches are consecutive indices of a sampler, which can be cut anywhere."""
    return isinstance(batch_sampler, BatchSampler) and type(batch_sampler).__iter__ is BatchSampler.__iter__


def record_order(sampler: object) -> OrderState:
    """Record the state that determines the order of the next epoch.

    Randomness from neither the sampler's `generator` nor its epoch is assumed to come from torch's default
    generator.
    """
    if isinstance(sampler, SequentialSampler):
        return {}
    if isinstance(sampler, SeedableRandomSampler):
        return {"seed": sampler.initial_seed, "epoch": sampler.epoch}
    generator = getattr(sampler, "generator", None)
    if isinstance(generator, torch.Generator):
        return {"generator": generator.get_state()}
    return {"torch": torch.get_rng_state()}


def record_source(sampler: object) -> OrderState:
    """Record what determines the orders of all later epochs: a seed, or the state of an own generator."""
    order = record_order(sampler)
    return {name: order[name] for name in ("seed", "generator") if name in order}


def restore_source(sampler: object, state: OrderState) -> None:
    """Restore a state of `record_source`; that of another kind of sampler changes nothing."""
    generator = getattr(sampler, "generator", None)
    if isinstance(sampler, SeedableRandomSampler) and "seed" in state:
        sampler.initial_seed = state["seed"]
    elif isinstance(generator, torch.Generator) and "generator" in state:
        generator.set_state(state["generator"])


@contextmanager
def replay_order(sampler: Any, state: OrderState | None) -> Generator[None]:
    """Make a sampler replay the recorded order within the context.

    A sampler draws its order with its first index: read the first index inside. Torch's default generator is
    restored afterwards; a generator of the sampler itself stays in the state after the replayed draw.
    """
    state = state or {}
    own = getattr(sampler, "generator", None)
    is_seeded = isinstance(sampler, SeedableRandomSampler)
    if state and (
        ("seed" in state) != is_seeded or ("generator" in state and not hasattr(sampler, "generator"))
    ):
        raise ValueError(
            f"The saved data position belongs to a sampler with a {next(iter(state))}, but this loader has "
            f"{sampler!r}. Build the loader, and prepare it, as in the saved run."
        )
    if "seed" in state:
        sampler.initial_seed, sampler.epoch = state["seed"], state["epoch"]
    elif "generator" in state and isinstance(own, torch.Generator):
        own.set_state(state["generator"])
    elif "generator" in state:
        sampler.generator = torch.Generator().set_state(state["generator"])
    elif "torch" in state and isinstance(own, torch.Generator):
        sampler.generator = None  # another number of ranks has given it one since
    try:
        with torch.random.fork_rng(devices=[], enabled="torch" in state):
            if "torch" in state:
                torch.set_rng_state(state["torch"])
            yield
    finally:
        if getattr(sampler, "generator", None) is not own:
            sampler.generator = own


def iterate_seeded(items: Iterator[Any], seeds: Sequence[int]) -> Iterator[Any]:
    """Iterate with `random`, numpy and torch seeded; in between and afterwards they have their own states."""
    end = object()
    states = (
        random.Random(seeds[0]).getstate(),  # noqa: S311 - for the order of samples
        np.random.RandomState(seeds[1]).get_state(),
        torch.Generator().manual_seed(seeds[2]).get_state(),
    )
    while True:
        own = _swap_states(states)
        try:
            item = next(items, end)
        finally:
            states = _swap_states(own)
        if item is end:
            return
        yield item


def _swap_states(states: tuple[Any, Any, torch.Tensor]) -> tuple[Any, Any, torch.Tensor]:
    """Set the states of `random`, numpy and torch; return those before."""
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
    return before


_RANDOM = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


def share_order(
    indices: Any,
    num_processes: int,
    rng_types: Iterable[RNGType],
    *,
    seedable: bool,
    seed: int | None,
) -> tuple[Any, list[RNGType], torch.Generator | None, list[int]]:
    """Make the sample order the same on all ranks.

    Samplers stay the user's objects, whose later changes count; a sampler of torch that has no generator gets
    one. Only a `RandomSampler` is replaced, by a seedable one, in a copy of torch's own batch sampler: if
    asked for, or for an order of `permute`.

    Returns:
        The indices; the generators to synchronise, with the one of the sampler; and the seeds of `random`,
        numpy and torch if samplers may draw from them.
    """
    types = list(rng_types)
    original: Any = innermost_sampler(indices)
    sampler: Any = original
    if type(original) is RandomSampler and (seedable or is_keyed(original)):
        source: Any = torch if seedable else original.generator or torch
        seeds = [source.initial_seed() if seed is None else seed]
        if num_processes > 1 and seed is None:
            broadcast_object_list(seeds)
        sampler = SeedableRandomSampler(
            original.data_source,
            replacement=original.replacement,
            num_samples=original._num_samples,
            generator=original.generator,
            data_seed=seeds[0],
        )
        indices = _replace_innermost(indices, original, sampler)
    generator = None if isinstance(sampler, SeedableRandomSampler) else getattr(sampler, "generator", None)
    if num_processes > 1 and isinstance(sampler, _RANDOM) and not isinstance(sampler, SeedableRandomSampler):
        if generator is None and RNGType.TORCH not in types:
            # Torch's default generator draws the seed, which `set_seed` thereby determines.
            drawn_seed = int(torch.empty((), dtype=torch.int64, device="cpu").random_().item())
            sampler.generator = generator = torch.Generator().manual_seed(drawn_seed)
        types += [RNGType.GENERATOR] if generator is not None else []
    if not isinstance(generator, torch.Generator):
        generator = None
        types = [kind for kind in types if kind is not RNGType.GENERATOR]
    # Torch's samplers draw from nothing but a generator of their own.
    is_plain = indices is sampler or is_plain_batch_sampler(indices)
    is_known = is_plain and (type(sampler) is SequentialSampler or isinstance(sampler, _RANDOM))
    seeds: list[int] = []
    if num_processes > 1 and not is_known:
        seeds = [random.getrandbits(31), int(np.random.randint(2**31)), int(torch.randint(2**31, ()))]
        broadcast_object_list(seeds)
    return indices, list(dict.fromkeys(types)), generator, seeds


def _replace_innermost(indices: Any, old: object, new: object) -> Any:
    """Return the samplers with the innermost sampler replaced."""
    if indices is old:
        return new
    if old is new:
        return indices
    around = copy(indices) if type(indices) is BatchSampler else indices
    below = "batch_sampler" if hasattr(indices, "batch_sampler") else "sampler"
    setattr(around, below, _replace_innermost(getattr(indices, below), old, new))
    return around
