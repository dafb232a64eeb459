"""Claim: ranks wait less for each other with batches by a budget of tokens than with as many samples each.

    uv run python tools/benchmarks/token_budget.py [--ranks 8]

Lengths are log-normal, cut to a budget of 8,192 tokens. A rank waits for the slowest one in each round of
batches. The baseline is a shuffled loader whose batches have as many samples as the others have on average.
Nothing is measured on a clock: the time of a batch is the sum of the costs of its samples.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

import torch

from accel_train import TokenBudgetBatchSampler

BUDGET, SAMPLES = 8192, 50_000


def idle_share(
    batches: Sequence[Sequence[int]], lengths: list[int], ranks: int, cost: Callable[[int], float]
) -> float:
    """Return the share of their time for which ranks wait, in complete rounds."""
    costs = torch.tensor([sum(cost(lengths[index]) for index in batch) for batch in batches]).double()
    rounds = costs[: len(costs) // ranks * ranks].view(-1, ranks)
    return 1 - float(rounds.sum() / (rounds.amax(1).sum() * ranks))


def main() -> None:
    """Print a row for each cost."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=8)
    ranks: int = parser.parse_args().ranks
    generator = torch.Generator().manual_seed(0)
    drawn = torch.empty(SAMPLES).log_normal_(6.0, 1.2, generator=generator)
    lengths: list[int] = drawn.long().clamp(1, BUDGET).tolist()
    costs: dict[str, Callable[[int], float]] = {"length": float, "length squared": lambda length: length**2}
    order: list[int] = torch.randperm(SAMPLES, generator=generator).tolist()
    print(f"{ranks} ranks, {SAMPLES} samples of {sum(lengths) / SAMPLES:.0f} tokens on average")
    for name, cost in costs.items():
        batches = [*TokenBudgetBatchSampler(lengths, BUDGET, multiple_of=ranks, cost=cost)]
        size = round(SAMPLES / len(batches))
        fixed = [order[start : start + size] for start in range(0, SAMPLES, size)]
        before, after = (idle_share(some, lengths, ranks, cost) for some in (fixed, batches))
        filled = sum(lengths) / (len(batches) * BUDGET)
        print(f"cost by {name}: idle {before:.1%} before, {after:.1%} after; {filled:.1%} of the budget used")


if __name__ == "__main__":
    main()
