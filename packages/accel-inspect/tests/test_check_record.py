from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel_inspect.check.record import (
    LoaderRecord,
    RankRecord,
    RecordedCollective,
    data_problems,
    differences,
    ranks_to_check,
)

GATHER = RecordedCollective(kind="gather", where="train.py:3")
SAVE = RecordedCollective(kind="save_state", where="train.py:9")
SEND = RecordedCollective(kind="send", where="train.py:5", peer=3, transferred=8)
RECEIVE = RecordedCollective(kind="receive", where="train.py:7", peer=0, transferred=8)


@pytest.mark.parametrize(
    ("first", "second", "pair"),
    [
        ((GATHER, SAVE), (GATHER, SAVE), None),
        ((GATHER, SAVE), (SAVE,), (GATHER, SAVE)),
        ((GATHER, SAVE), (GATHER,), (SAVE, None)),
        ((), (SAVE,), (None, SAVE)),
        ((SEND, SAVE), (RECEIVE, SAVE), None),
    ],
)
def test_the_first_point_at_which_ranks_part_is_found(first, second, pair):
    records = [
        RankRecord(rank=0, events=first),
        RankRecord(rank=3, events=second),
        RankRecord(rank=5, events=second),
    ]
    own, other = ("has ended" if event is None else f"calls {event}" for event in pair or (None, None))
    expected = [f"rank 0 {own}, while rank 3, 5 {other}: both would wait forever"] if pair else []
    assert differences(records) == expected


def test_what_a_rank_would_do_after_an_error_is_not_guessed():
    stopped = RankRecord(rank=1, events=(GATHER,), stopped="ValueError")
    assert differences([RankRecord(rank=0, events=(GATHER, SAVE)), stopped]) == []


@given(
    st.lists(st.sampled_from((GATHER, SAVE)), max_size=5),
    st.lists(st.sampled_from((GATHER, SAVE)), max_size=5),
)
def test_ranks_part_exactly_if_they_do_different_things(first, second):
    records = [RankRecord(rank=0, events=tuple(first)), RankRecord(rank=1, events=tuple(second))]
    assert bool(differences(records)) == (first != second)


@given(st.integers(1, 10**4), st.integers(1, 16))
def test_the_ranks_to_try_exist_and_the_ends_are_among_them(world, local):
    ranks = ranks_to_check(world, local)
    assert ranks == tuple(sorted(set(ranks)))
    assert ranks[0] == 0
    assert ranks[-1] == world - 1


def test_samples_that_ranks_share_or_miss_are_problems_unless_they_share_a_shard():
    def problems(*pairs):
        loaders = [LoaderRecord(where="train.py:3", **facts) for facts in pairs]
        return data_problems(
            [RankRecord(rank=rank, loaders=(loader,)) for rank, loader in enumerate(loaders)]
        )

    same = {"batches": ("a", "b")}
    (text,) = problems({"shard": 0, **same}, {"shard": 1, **same})
    assert text == "rank 0 and rank 1 read the same samples from the loader prepared at train.py:3"
    assert problems({"shard": 0, **same}, {"shard": 0, **same}) == []
    assert problems({"shard": 0, **same}, {"shard": 1, "batches": ("c",)}) == []
    assert problems({"shard": 0}, {"shard": 1}) == []
    (text,) = problems({"shard": 0, "indices": "a"}, {"shard": 1, "indices": "b"})
    assert "miss samples" in text
    assert "already_sharded=True" in text
    assert problems({"shard": 0, "indices": "a"}, {"shard": 1, "indices": "a"}) == []
