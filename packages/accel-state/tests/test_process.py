from __future__ import annotations

import itertools
import sys
import types

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accel_state.partial_state import goes_first, only_if, shard_bounds, shard_inputs

SHARES = st.integers(1, 7)


def brute_force(items: list[int], num_shards: int, *, apply_padding: bool) -> list[list[int]]:
    """Deal the items out one by one to see how many each gets, then cut."""
    counts = [0] * num_shards
    for index in range(len(items)):
        counts[index % num_shards] += 1
    rest = list(items)
    shares = [[rest.pop(0) for _ in range(count)] for count in counts]
    longest = max(counts)
    if apply_padding and items:
        shares = [share + [items[-1]] * (longest - len(share)) for share in shares]
    return shares


@given(items=st.lists(st.integers(), max_size=20), num_shards=SHARES, apply_padding=st.booleans())
def test_shares_of_every_container_agree_with_dealing_items_out(items, num_shards, apply_padding):
    expected = brute_force(items, num_shards, apply_padding=apply_padding)
    for index in range(num_shards):
        options = {"apply_padding": apply_padding}
        assert shard_inputs(items, num_shards, index, **options) == expected[index]
        assert shard_inputs(tuple(items), num_shards, index, **options) == tuple(expected[index])
        array = shard_inputs(np.array(items, dtype=object), num_shards, index, **options)
        assert array.tolist() == expected[index]
        rows = torch.arange(2 * len(items)).view(-1, 2)
        share = shard_inputs(rows, num_shards, index, **options)
        assert share.shape[1:] == (2,)
        assert share.shape[0] == len(expected[index])


@given(length=st.integers(0, 50), num_shards=SHARES)
def test_shares_without_padding_are_the_whole_in_order(length, num_shards):
    bounds = [shard_bounds(length, num_shards, index) for index in range(num_shards)]
    assert bounds[0][0] == 0
    assert bounds[-1][1] == length
    assert all(before[1] == after[0] for before, after in itertools.pairwise(bounds))
    sizes = [end - begin for begin, end in bounds]
    assert max(sizes) - min(sizes) <= 1


def test_the_values_of_a_dict_are_split_alike_and_the_dict_is_left_alone():
    inputs = {"a": [1, 2, 3], "b": torch.tensor([4, 5, 6])}
    first, second = (shard_inputs(inputs, 2, index) for index in range(2))
    assert (first["a"], first["b"].tolist()) == ([1, 2], [4, 5])
    assert (second["a"], second["b"].tolist()) == ([3], [6])
    assert inputs["a"] == [1, 2, 3]


def test_the_values_of_a_dict_must_be_equally_long():
    with pytest.raises(ValueError, match=r"\{'a': 2, 'b': 3\}"):
        shard_inputs({"a": [1, 2], "b": [1, 2, 3]}, 2, 0)


@pytest.mark.parametrize("inputs", ["text", 5, {1, 2}, None])
def test_what_cannot_be_split_is_named(inputs):
    with pytest.raises(TypeError, match=type(inputs).__name__):
        shard_inputs(inputs, 2, 0)


@pytest.fixture
def dataset(monkeypatch):
    """A fake of `datasets.Dataset`, which is recognised by its name and its package."""

    class Dataset:
        def __init__(self, rows):
            self.rows = list(rows)

        def __len__(self):
            return len(self.rows)

        def select(self, indices):
            return Dataset(self.rows[index] for index in indices)

    Dataset.__module__ = "datasets.arrow_dataset"
    monkeypatch.setitem(sys.modules, "datasets", types.ModuleType("datasets"))
    return Dataset


def test_a_dataset_is_split_by_selecting_rows(dataset):
    shares = [shard_inputs(dataset(range(5)), 2, index, apply_padding=True).rows for index in range(2)]
    assert shares == [[0, 1, 2], [3, 4, 4]]


def test_a_function_for_others_keeps_its_name_and_does_nothing():
    def save() -> str:
        """Save."""
        return "saved"

    assert only_if(True, save) is save
    elsewhere = only_if(False, save)
    assert elsewhere() is None
    assert (elsewhere.__name__, elsewhere.__doc__) == ("save", "Save.")


@pytest.mark.parametrize(("first", "expected"), [(True, ["block", "barrier"]), (False, ["barrier", "block"])])
def test_the_block_runs_before_the_barrier_on_the_first_and_after_it_on_the_others(first, expected):
    order: list[str] = []
    with goes_first(first, lambda: order.append("barrier")):
        order.append("block")
    assert order == expected


@pytest.mark.parametrize("first", [True, False])
def test_an_error_in_the_block_does_not_leave_the_others_waiting(first):
    barriers: list[int] = []
    with pytest.raises(KeyError), goes_first(first, lambda: barriers.append(1)):
        raise KeyError
    assert len(barriers) == 1
