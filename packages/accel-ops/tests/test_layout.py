"""Weight files: names, sizes and shards."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accel_ops.weights.layout import (
    SAFE_WEIGHTS_PATTERN_NAME,
    convert_bytes,
    convert_file_size_to_int,
    dtype_byte_size,
    fill_shards,
    groups_of,
    numbered,
)
from accel_state.errors import SettingsError
from accel_state.labels import CustomDtype


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1GB", 10**9),
        (2.75, 2),
        ("8Gb", 10**9),
        ("2 GiB", 2**31),
        ("0.5MB", 500_000),
        ("12", 12),
        ("7B", 7),
        ("3kib", 3072),
        (5, 5),
    ],
)
def test_a_size_is_read_with_its_unit(text, size):
    assert convert_file_size_to_int(text) == size


@pytest.mark.parametrize("size", [float("inf"), float("nan"), [1]])
def test_a_number_that_is_no_size_is_refused(size):
    with pytest.raises(SettingsError, match="is not a size"):
        convert_file_size_to_int(size)


@pytest.mark.parametrize("text", ["", "GB", "5 apples", "-1GB", "1.2.3GB", "5i", "1e3"])
def test_a_text_that_is_no_size_is_named(text):
    with pytest.raises(SettingsError, match="is not a size"):
        convert_file_size_to_int(text)


def test_sizes_print_in_binary_steps():
    sizes = (0, 1023, 1024, 1536 * 1024, 5 * 2**30, 3 * 2**50)
    assert [convert_bytes(size) for size in sizes] == [
        "0 bytes",
        "1023 bytes",
        "1.0 KB",
        "1.5 MB",
        "5.0 GB",
        "3.0 PB",
    ]


def test_an_element_takes_what_torch_says():
    for dtype in (torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.complex64):
        assert dtype_byte_size(dtype) == torch.empty(1, dtype=dtype).element_size()
    assert [dtype_byte_size(d) for d in (CustomDtype.FP8, CustomDtype.INT4, CustomDtype.INT2)] == [
        1,
        0.5,
        0.25,
    ]


def planned(tensors, limit):
    shards = [*fill_shards(groups_of(tensors), limit)]
    names = [[name for group in groups for name in group] for groups, _ in shards]
    return numbered(names, total_size=sum(size for _, size in shards), pattern=SAFE_WEIGHTS_PATTERN_NAME)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=30), st.integers(4, 400))
def test_shards_keep_order_fill_up_and_hold_everything_once(lengths, limit):
    tensors = {f"t{i}": torch.empty(n) for i, n in enumerate(lengths)}
    plan = planned(tensors, limit)
    assert [name for names in plan.files.values() for name in names] == list(tensors)
    sizes = [[4 * len(tensors[name]) for name in names] for names in plan.files.values()]
    assert all(sum(shard) <= limit or len(shard) == 1 for shard in sizes)
    # Nothing that begins a shard would have fitted in the shard before.
    assert all(sum(a) + b[0] > limit for a, b in itertools.pairwise(sizes))
    assert plan.total_size == 4 * sum(lengths)
    assert (plan.index is None) == (len(plan.files) == 1)


def test_tensors_of_one_storage_stay_in_one_shard_and_count_once():
    base = torch.zeros(10)
    tensors = {"a": base, "b": torch.zeros(10), "c": base, "d": base[:5]}
    plan = planned(tensors, 40)
    assert plan.files == {
        "model-00001-of-00002.safetensors": ("a", "c", "d"),
        "model-00002-of-00002.safetensors": ("b",),
    }
    assert plan.total_size == 80
