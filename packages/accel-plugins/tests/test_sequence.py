"""Cutting batches to the part of one rank; DeepSpeed and transformers are not needed."""

from __future__ import annotations

from collections import UserDict
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accel_plugins.parallelism.sequence import SequenceShard
from accel_state.errors import SettingsError


def tokens(rows: int, length: int) -> torch.Tensor:
    return torch.arange(rows * length).reshape(rows, length)


@given(size=st.integers(1, 4), chunk=st.integers(1, 5), rows=st.integers(1, 3))
def test_parts_make_the_whole_and_every_token_has_the_label_of_the_next(size: int, chunk: int, rows: int):
    whole = tokens(rows, size * chunk)
    batch = {"input_ids": whole, "labels": whole.clone(), "lengths": torch.ones(rows), "name": "a"}
    parts = [SequenceShard(size=size, rank=rank)(batch) for rank in range(size)]
    assert {*batch} == {"input_ids", "labels", "lengths", "name"}, "the given batch stays as it is"
    assert torch.equal(torch.cat([part["input_ids"] for part in parts], 1), whole)
    positions = torch.cat([part["position_ids"] for part in parts], 1)
    assert torch.equal(positions, torch.arange(size * chunk).expand(rows, -1))
    labels = torch.cat([part["shift_labels"] for part in parts], 1)
    assert torch.equal(labels[:, :-1], whole[:, 1:])
    assert (labels[:, -1] == -100).all()
    for part in parts:
        assert part["name"] == "a"
        assert torch.equal(part["lengths"], torch.ones(rows))
        assert all(value.is_contiguous() for value in part.values() if isinstance(value, torch.Tensor))


def test_a_batch_stays_of_its_type_and_keeps_positions_that_it_has():
    batch = UserDict({"input_ids": tokens(1, 4), "position_ids": tokens(1, 4) + 7})
    part = SequenceShard(size=2, rank=1)(batch)
    assert type(part) is UserDict
    assert part["position_ids"].tolist() == [[9, 10]]
    assert "shift_labels" not in part


@pytest.mark.parametrize(
    ("batch", "story"),
    [
        ([tokens(1, 4)], "a batch is a list"),
        ({"pixels": tokens(1, 4)}, r"a batch is a dict with \['pixels'\]"),
        ({"input_ids": torch.arange(4)}, r"the shape \(4,\): expected"),
        ({"input_ids": tokens(1, 5)}, r"\(1, 5\): the length 5 is not.*pad_to_multiple_of=2"),
        ({"input_ids": tokens(1, 4), "extra": tokens(1, 3)}, r"\(1, 4\).*'extra' \(1, 3\)"),
        (
            {"input_ids": tokens(2, 4), "labels": torch.arange(2)},
            r"\(2, 4\).*'labels' \(2,\).*a label for each",
        ),
    ],
)
def test_what_cannot_be_cut_is_named(batch: Any, story: str):
    with pytest.raises(SettingsError, match=story):
        SequenceShard(size=2, rank=0)(batch)


def test_another_length_than_the_one_that_was_promised_is_refused():
    part = SequenceShard(size=2, rank=0, length=6)
    assert part({"input_ids": tokens(1, 6)})["input_ids"].shape == (1, 3)
    with pytest.raises(SettingsError, match=r"\(1, 4\).*sp_seq_length=6"):
        part({"input_ids": tokens(1, 4)})


def test_boundaries_of_packed_samples_give_positions():
    batch = {"input_ids": tokens(1, 6), "cu_seq_lens_q": torch.tensor([0, 2, 6], dtype=torch.int32)}
    parts = [SequenceShard(size=2, rank=rank)(batch) for rank in range(2)]
    assert torch.cat([part["position_ids"] for part in parts], 1).tolist() == [[0, 1, 0, 1, 2, 3]]
    assert all(torch.equal(part["cu_seq_lens_q"], batch["cu_seq_lens_q"]) for part in parts)


def test_labels_that_were_shifted_are_kept():
    batch = {"input_ids": tokens(1, 4), "labels": tokens(1, 4), "shift_labels": tokens(1, 4) + 9}
    part = SequenceShard(size=2, rank=1)(batch)
    assert part["shift_labels"].tolist() == [[11, 12]]
    assert "labels" not in part
