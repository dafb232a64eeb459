"""Results of collectives on 200 random trees stay those of the first implementation, to the last bit.

`python packages/accel-ops/tests/test_oracle.py` prints the digests of the present results.
"""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path

import pytest
import torch

from accel_ops import broadcast, gather, pad_across_processes, reduce
from accel_ops.tree import walk
from accel_state.testing import ThreadRanks

TREES = 200
ORACLE = Path(__file__).with_suffix(".json")
DTYPES = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint64),
    *(torch.bool, torch.complex64),
]


def make_tree(number: int, rank: int, *, uneven: bool):
    """Return nested tensors with the same structure on every rank, and other values; rows may differ."""
    shape = random.Random(number)
    rows = random.Random(f"{number} {rank}")
    generator = torch.Generator().manual_seed(31 * number + rank)

    def make_leaf():
        dtype, dims = shape.choice(DTYPES), [shape.randrange(4) for _ in range(shape.randrange(4))]
        if uneven and dims:
            dims[0] = rows.randrange(5)
        values = torch.randint(-4, 5, dims, generator=generator)
        leaf = values.abs().to(dtype) if dtype in {torch.uint8, torch.uint64} else values.to(dtype)
        kind = shape.randrange(5)
        if kind == 0 and len(dims) == 2:
            return leaf.t().contiguous().t()
        if kind == 1 and dims and not uneven:
            return leaf.repeat(2, *[1] * (len(dims) - 1))[::2]
        return leaf

    def make(depth: int):
        kind = shape.randrange(5 if depth else 3)
        if depth == 3 or kind > 2:
            return make_leaf()
        inside = [make(depth + 1) for _ in range(shape.randrange(1, 5))]
        if kind == 0:
            return inside
        return tuple(inside) if kind == 1 else {f"key {index}": value for index, value in enumerate(inside)}

    return make(0)


def digest(results) -> str:
    """Hash paths, dtypes, shapes and bits."""
    whole = hashlib.sha256()
    for path, leaf in walk(results):
        whole.update(f"{path} {leaf.dtype} {[*leaf.shape]}".encode())
        flat = leaf.new_empty(leaf.numel()).copy_(leaf.reshape(-1))
        whole.update(flat.view(torch.uint8).numpy().tobytes())
    return whole.hexdigest()[:16]


def results_of(number: int) -> str:
    """Run all collectives on a tree over two or three ranks; the digest of the results of every rank."""
    even = make_tree(number, 0, uneven=False)
    has_order = all(not leaf.is_complex() and leaf.dtype != torch.uint64 for _, leaf in walk(even))

    def body(rank: int):
        own, other = make_tree(number, rank, uneven=False), make_tree(number, rank, uneven=True)
        return [
            gather(own),
            gather(other),
            reduce(own, "sum"),
            reduce(own, "mean"),
            reduce(own, "mean", scale=0.5),
            *([reduce(own, "max"), reduce(own, "min", scale=2.0)] if has_order else []),
            pad_across_processes(other, pad_index=1),
            broadcast(own, 1),
        ]

    return digest(ThreadRanks(size=2 + number % 2).run(body))


@pytest.mark.parametrize("start", range(0, TREES, 20))
def test_results_are_those_of_the_first_implementation(start: int) -> None:
    known = json.loads(ORACLE.read_text(encoding="utf-8"))
    numbers = range(start, start + 20)
    assert [results_of(number) for number in numbers] == [known[number] for number in numbers]


if __name__ == "__main__":
    print(json.dumps([results_of(number) for number in range(TREES)], indent=0))
