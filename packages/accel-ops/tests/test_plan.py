from __future__ import annotations

import itertools
import os
import subprocess
import sys

import torch
from hypothesis import given
from hypothesis import strategies as st

from accel_ops import packing
from accel_ops.packing import Leaf

DTYPES = [torch.uint8, torch.bool, torch.bfloat16, torch.float32, torch.int64, torch.complex128]

shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)
leaves = st.lists(st.tuples(st.sampled_from(DTYPES), shapes), max_size=8).map(
    lambda kinds: [Leaf(path=f"[{i}]", dtype=dtype, shape=shape) for i, (dtype, shape) in enumerate(kinds)]
)


def with_rows(found: list[Leaf], rows: list[int]) -> list[Leaf]:
    """The same leaves on another rank."""
    return [
        Leaf(path=leaf.path, dtype=leaf.dtype, shape=(count, *leaf.shape[1:]) if leaf.shape else ())
        for leaf, count in zip(found, rows, strict=True)
    ]


@given(leaves)
def test_every_leaf_lies_once_and_aligned_and_nothing_lies_between(found: list[Leaf]) -> None:
    buckets = packing.lay_out(found)
    position = 0
    for bucket in buckets:
        assert bucket.start == position
        assert bucket.start % bucket.dtype.itemsize == 0
        for index, rows in zip(bucket.members, bucket.rows, strict=True):
            assert found[index].rows == rows
            assert found[index].dtype == bucket.dtype
            assert found[index].shape[1:] == bucket.trailing
            position += found[index].nbytes
        assert bucket.stop == position
    assert sorted(index for bucket in buckets for index in bucket.members) == list(range(len(found)))


@given(leaves, st.randoms())
def test_the_order_of_the_leaves_changes_neither_the_layout_nor_the_signature(found, random) -> None:
    shuffled = random.sample(found, len(found))
    lying = [[found[i].path for i in bucket.members] for bucket in packing.lay_out(found)]
    assert lying == [[shuffled[i].path for i in bucket.members] for bucket in packing.lay_out(shuffled)]
    assert packing.signature(found) == packing.signature(shuffled)


def test_the_signature_sees_everything_but_dimension_0() -> None:
    base = Leaf(path="['x']", dtype=torch.float32, shape=(2, 3))
    same = Leaf(path="['x']", dtype=torch.float32, shape=(9, 3))
    others = [
        Leaf(path="['y']", dtype=torch.float32, shape=(2, 3)),
        Leaf(path="['x']", dtype=torch.float64, shape=(2, 3)),
        Leaf(path="['x']", dtype=torch.float32, shape=(2, 4)),
        Leaf(path="['x']", dtype=torch.float32, shape=(2,)),
        Leaf(path="['x']", dtype=torch.float32, shape=()),
    ]
    assert packing.signature([base]) == packing.signature([same])
    assert len({packing.signature([leaf]) for leaf in [base, *others]}) == 6


def test_the_signature_is_the_same_in_every_process() -> None:
    code = "from accel_ops.packing import digest; print(digest('accel'))"
    seeds = ("1", "2")
    found = [
        subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
        ).stdout
        for seed in seeds
    ]
    assert {int(answer) for answer in found} == {packing.digest("accel")}


@given(leaves, st.data())
def test_placing_equals_laying_out_the_other_ranks_leaves(found: list[Leaf], data: st.DataObject) -> None:
    rows = [data.draw(st.integers(0, 3)) if leaf.shape else 1 for leaf in found]
    buckets = packing.lay_out(found)
    in_order = [rows[index] for bucket in buckets for index in bucket.members]
    assert packing.at_rows(buckets, in_order) == packing.lay_out(with_rows(found, rows))


@given(leaves, st.integers(1, 3), st.data())
def test_interleaving_equals_brute_force(found: list[Leaf], world_size: int, data: st.DataObject) -> None:
    ranks = []
    for _ in range(world_size):
        rows = [data.draw(st.integers(0, 3)) if leaf.shape else 1 for leaf in found]
        ranks.append(packing.lay_out(with_rows(found, rows)))
    start = 64
    stride = start + max([buckets[-1].stop for buckets in ranks if buckets], default=0) + 16
    memory = list(range(stride * world_size))
    wanted: list[int] = []
    by_rank = []
    for rank, buckets in enumerate(ranks):
        position = itertools.count(rank * stride + start)
        by_rank.append(
            [
                [memory[next(position)] for _ in range(rows * bucket.row_bytes)]
                for bucket in buckets
                for rows in bucket.rows
            ]
        )
    for of_leaf in zip(*by_rank, strict=True):
        wanted += [address for part in of_leaf for address in part]
    pieces = packing.interleave(ranks, start, stride)
    assert [address for first, length in pieces for address in memory[first : first + length]] == wanted
    unit = packing.unit_of([*pieces, (0, stride)])
    assert stride % unit == 0
    units = [memory[first : first + unit] for first in range(0, len(memory), unit)]
    assert [address for index in packing.index_of(pieces, unit) for address in units[index]] == wanted


def test_large_leaves_travel_alone() -> None:
    found = [
        Leaf(path="['b']", dtype=torch.uint8, shape=(packing.LARGE,)),
        Leaf(path="['a']", dtype=torch.uint8, shape=(packing.LARGE - 1,)),
        Leaf(path="['0']", dtype=torch.float32, shape=(packing.LARGE,)),
    ]
    assert packing.split_large(found) == ((1,), (2, 0))
