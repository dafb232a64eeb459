"""Batches by a budget of tokens, balanced over ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from heapq import heappop, heappush, heapreplace
from itertools import chain
from typing import Any

import torch
from torch.utils.data import BatchSampler, SequentialSampler

from accel_state import runtime
from accel_train.data.samplers import SeedableRandomSampler

_ROUNDS = 8
"""Rounds that are filled together: enough for full batches, few enough to keep the order random."""


class TokenBudgetBatchSampler(BatchSampler):
    """Make batches of at most some number of tokens, in rounds of batches that take about as long.

    Prepared loaders deal batches to ranks in turn: every rank gets one of each round, so that all have as
    many batches, and wait little for each other. Samples are read in the order of the sampler, a few rounds
    at a time, and the most costly ones are placed first, each into the batch that costs least so far. The
    tokens of a batch are the sum of its lengths: samples are packed, not padded.

    The batches depend only on the arguments and the epoch. A loader's position is therefore valid for any
    number of ranks that divides `multiple_of`. If there are too few samples for the batches of the last
    round, loaders complete it as they do any other.

    Args:
        lengths: The number of tokens of each sample of the dataset, of shape `(samples,)`.
        max_tokens: The largest number of tokens of a batch.
        cost: The time that a sample of some length takes, in any unit; its length if `None`. For long
            sequences, whose attention dominates, `lambda length: length**2`.
        multiple_of: The number of batches in a round: a multiple of the number of ranks, such as that of the
            micro-batches of all ranks in an optimizer step; the number of ranks if `None`.
        shuffle: Whether the order is random, by `seed` and the epoch; otherwise that of the dataset.
        seed: The seed of the order, the same on all ranks.
        drop_last: Whether an incomplete last round is dropped.

    Raises:
        ValueError: A sample has no tokens, or more than `max_tokens`, or `multiple_of` is not positive.

    Example:
        >>> lengths = [7, 2, 3, 3, 1, 4, 2, 2]
        >>> batches = TokenBudgetBatchSampler(lengths, max_tokens=8, multiple_of=2, shuffle=False)
        >>> [[lengths[index] for index in batch] for batch in batches]
        [[7], [2, 3, 1], [4, 2], [3, 2]]
    """

    def __init__(
        self,
        lengths: Sequence[int] | torch.Tensor,
        max_tokens: int,
        *,
        cost: Callable[[int], float] | None = None,
        multiple_of: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        self.lengths: list[int] = torch.as_tensor(lengths, device="cpu").tolist()
        self.max_tokens = max_tokens
        self.cost = cost or float
        self.multiple_of = runtime.active.topology.world_size if multiple_of is None else multiple_of
        self.drop_last = drop_last
        indices = range(len(self.lengths))
        self.sampler: Any = SequentialSampler(indices)
        if shuffle:
            self.sampler = SeedableRandomSampler(indices, data_seed=seed)
        self._counted: tuple[Any, int] | None = None
        for index, length in enumerate(self.lengths):
            if not 0 < length <= max_tokens:
                raise ValueError(
                    f"TokenBudgetBatchSampler: sample {index} has {length!r} tokens, and a batch has 1 to "
                    f"max_tokens={max_tokens!r}. Cut or drop it, or raise max_tokens."
                )
        if self.multiple_of < 1:
            raise ValueError(f"TokenBudgetBatchSampler(multiple_of={multiple_of!r}): expected 1 or more.")

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the batches of the current epoch, then begin the next epoch."""
        sampler = self.sampler
        if not isinstance(sampler, SeedableRandomSampler):
            yield from self._batches(iter(sampler))
            return
        epoch = sampler.epoch
        yield from self._batches(sampler.iterate_from(0))
        sampler.end_epoch(epoch)

    def __len__(self) -> int:
        """Number of batches of the current epoch, of all ranks: in another order it may be another."""
        sampler = self.sampler
        is_seeded = isinstance(sampler, SeedableRandomSampler)
        key = (sampler.initial_seed, sampler.epoch) if is_seeded else None
        if self._counted is None or self._counted[0] != key:
            order = sampler.iterate_from(0) if is_seeded else iter(sampler)
            self._counted = key, sum(1 for _ in self._batches(order))
        return self._counted[1]

    def _batches(self, order: Iterator[int]) -> Iterator[list[int]]:
        """Fill some rounds at a time; what does not fit into them belongs to the next ones."""
        capacity = _ROUNDS * self.multiple_of * self.max_tokens
        pool: list[int] = []
        rounds: list[list[list[int]]] = []
        tokens = 0
        for index in order:
            pool.append(index)
            tokens += self.lengths[index]
            if tokens >= capacity:
                rounds, pool = self._fill(pool, _ROUNDS)
                tokens = sum(self.lengths[index] for index in pool)
                yield from chain.from_iterable(rounds)
        rest, number = pool, -(-tokens // (self.max_tokens * self.multiple_of))
        rounds = []
        while rest:
            rounds, rest = self._fill(pool, number)
            number += 1
        for batches in rounds:
            if len(batches) == self.multiple_of or not self.drop_last:
                yield from batches

    def _fill(self, pool: list[int], number: int) -> tuple[list[list[list[int]]], list[int]]:
        """Place samples into the batches of some rounds; return these, and the samples left over.

        The greedy rule of Graham (https://doi.org/10.1137/0117039), within the budget of each batch.
        """
        # 1. Place each sample, by its position in the pool, into the batch that costs least and has room.
        positions: list[list[int]] = [[] for _ in range(number * self.multiple_of)]
        room = [self.max_tokens] * len(positions)
        costs = [(0.0, batch) for batch in range(len(positions))]
        rest: list[int] = []
        for position in sorted(range(len(pool)), key=lambda at: -self.cost(self.lengths[pool[at]])):
            length = self.lengths[pool[position]]
            full: list[tuple[float, int]] = []
            while costs and room[costs[0][1]] < length:
                full.append(heappop(costs))
            if costs:
                total, batch = costs[0]
                heapreplace(costs, (total + self.cost(length), batch))
                positions[batch].append(position)
                room[batch] -= length
            else:
                rest.append(position)
            for pair in full:
                heappush(costs, pair)
        # 2. Batches of similar cost make a round. Rounds keep the order of the pool, an incomplete one last.
        by_cost = [sorted(positions[batch]) for _, batch in sorted(costs, reverse=True) if positions[batch]]
        starts = range(0, len(by_cost), self.multiple_of)
        rounds = [by_cost[start : start + self.multiple_of] for start in starts]
        rounds.sort(key=lambda batches: (len(batches) < self.multiple_of, min(batches)))
        return [[[pool[at] for at in batch] for batch in batches] for batches in rounds], [
            pool[at] for at in sorted(rest)
        ]
