from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel_state.rank_status import LEAST, SHARE, STEPS, RankSampler, RankStatus, find_slow


def status(rank: int, steps: int, waits: int, samples: int = 1000) -> RankStatus:
    return RankStatus(
        rank=rank, steps=steps, waits=waits, samples=samples, host=f"node-{rank // 2}", busy="t.py:1 `f()`"
    )


@given(st.lists(st.floats(0, 1), min_size=1, max_size=9))
def test_a_slow_rank_is_one_below_the_median_of_the_others(shares: list[float]):
    slow = find_slow(dict(enumerate(shares)))
    for rank, own in enumerate(shares):
        others = sorted(shares[:rank] + shares[rank + 1 :])
        usual = others[len(others) // 2] if others else 0.0
        assert slow.get(rank) == (pytest.approx(usual - own, abs=1e-3) if usual - own >= SHARE else None)


def compared(waits: list[int], samples: int = 1000) -> str | None:
    sampler = RankSampler(lambda: 1, "/torch/distributed")
    assert sampler.compare({rank: status(rank, 0, 0, 0) for rank in range(len(waits))}) is None
    return sampler.compare({rank: status(rank, 120, waited, samples) for rank, waited in enumerate(waits)})


def test_few_samples_accuse_nobody():
    assert compared([6, 4], samples=10) is None
    assert compared([0, 0], samples=0) is None
    assert "rank 1 in 20% of the time" in (compared([600, 400]) or "")


def test_the_line_tells_where_the_slowest_is():
    assert compared([500, 400, 300, 200, 900, 900, 900, 900, 900, 900]) == (
        "In the last 120 steps the others waited for ranks 0-3 in 70% of the time: "
        "rank 3 (node-1) is most often at t.py:1 `f()`."
    )


def test_a_line_tells_of_the_steps_since_the_last_one():
    done = [1]
    sampler = RankSampler(lambda: done[0], "/torch/distributed")
    assert sampler.is_due(), "the first comparison begins a window"
    before = {0: status(0, 1, 0, 0), 1: status(1, 1, 0, 0)}
    assert sampler.compare(before) is None
    done[0] = STEPS
    assert not sampler.is_due(), "too few steps"
    done[0] = 1 + STEPS
    assert sampler.is_due()
    soon = {0: status(0, 101, 80, LEAST - 1), 1: status(1, 101, 0, LEAST - 1)}
    assert sampler.compare(soon) is None, "too short a time"
    line = sampler.compare({0: status(0, 101, 800), 1: status(1, 101, 300)})
    assert line is not None
    assert line.startswith("In the last 100 steps the others waited for rank 1 in 50% of the time")
    assert "rank 1 (node-0) is most often at t.py:1 `f()`" in line
    assert sampler.report == {"system/straggler_share": 0.5, "system/straggler_rank": 1}
    even = {0: status(0, 201, 1300, 2000), 1: status(1, 201, 800, 2000)}
    assert sampler.compare(even) is None
    assert sampler.report == {"system/straggler_share": 0.0, "system/straggler_rank": -1}


def test_nothing_is_compared_while_a_rank_has_no_status():
    sampler = RankSampler(lambda: 1, "/torch/distributed")
    assert sampler.compare({0: status(0, 1, 0), 1: None}) is None
    assert sampler.is_due(), "no window has begun"


def test_samples_of_an_earlier_run_are_not_compared():
    sampler = RankSampler(lambda: 1, "/torch/distributed")
    sampler.compare({0: status(0, 320, 9), 1: status(1, 320, 9)})
    assert sampler.compare({0: status(0, 1, 0, 1), 1: status(1, 1, 0, 1)}) is None


def test_a_status_of_an_earlier_sampler_is_not_compared():
    sampler = RankSampler(lambda: 1, "/torch/distributed", run=1)
    old, new = replace(status(1, 320, 9), run=0), replace(status(1, 1, 0), run=1)
    assert sampler.compare({0: replace(status(0, 1, 0, 0), run=1), 1: old}) is None
    assert not sampler._before
    assert sampler.compare({0: replace(status(0, 1, 0, 0), run=1), 1: new}) is None
    assert sampler._before


def test_samples_tell_waiting_from_work_and_where_the_work_is():
    sampler = RankSampler(lambda: 7, "/nowhere")
    with ThreadPoolExecutor(
        max_workers=1
    ) as pool:  # on one line from before the first sample to after the last
        pool.submit(take_four, sampler).result()  # the work
    fields = sampler.status_fields()
    assert (fields["steps"], fields["samples"], fields["waits"]) == (7, 4, 2)
    assert fields["busy"].endswith(" `pool.submit(take_four, sampler).result()  # the work`")
    assert RankStatus.from_text(json.dumps({"rank": 0, **fields})).busy == fields["busy"]


def take_four(sampler: RankSampler) -> None:
    for number in range(4):
        sampler.take(is_inside=number % 2 == 1)


def test_code_of_the_folder_is_waiting_where_it_is_innermost():
    sampler = RankSampler(lambda: 0, str(Path(__file__).parent))
    sampler.take(is_inside=False)  # in the main thread: the innermost frame is the sampler's own
    assert sampler.waits == 0
    sampler = RankSampler(lambda: 0, str(Path(sys.modules[RankSampler.__module__].__file__ or "").parent))
    sampler.take(is_inside=False)
    assert sampler.waits == 1
