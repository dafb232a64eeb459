from __future__ import annotations

import json
import random
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel_state.rank_status import RankStatus
from accel_state.stragglers import SHARE, STEPS, RankSampler, Window, find_slow, format_slow


def status(rank: int, steps: int, waits: int, samples: int = 1000) -> RankStatus:
    return RankStatus(
        rank=rank, steps=steps, waits=waits, samples=samples, host=f"node-{rank // 2}", busy="t.py:1 `f()`"
    )


def windows(*waits: int, samples: int = 1000) -> dict[int, Window]:
    return {rank: Window(samples=samples, waits=count) for rank, count in enumerate(waits)}


@given(st.lists(st.integers(0, 1000), min_size=2, max_size=9))
def test_a_slow_rank_is_one_below_the_median_of_the_others(waits: list[int]):
    slow = find_slow(windows(*waits))
    for rank, own in enumerate(waits):
        others = sorted(waits[:rank] + waits[rank + 1 :])
        usual = others[len(others) // 2]
        if usual - own < 1000 * SHARE:
            assert rank not in slow
        if usual - own > 300:  # more than chance explains
            assert slow[rank] == pytest.approx((usual - own) / 1000, abs=1e-3)


def test_few_samples_accuse_nobody():
    assert not find_slow(windows(6, 4, samples=10))
    assert find_slow(windows(600, 400)) == {1: 0.2}


def test_ranks_that_no_sample_tells_of_accuse_nobody():
    assert not find_slow(windows(0, 0, samples=0))
    assert not find_slow({0: Window(samples=10, waits=3)})


def test_the_line_has_the_slowest_first_and_no_more_than_three():
    slow = {rank: rank / 10 for rank in range(1, 6)}
    line = format_slow(windows(*range(6)), slow, steps=120, seconds=12.4)
    assert line.startswith(
        "In the last 120 steps (12 s) the others waited for ranks 1-5 in 50% of the time: "
    )
    assert [line.index(f"rank {rank} (") for rank in (5, 4, 3)] == sorted(
        line.index(f"rank {rank} (") for rank in (5, 4, 3)
    )
    assert line.endswith("; and 2 more.")


def test_a_line_tells_of_the_steps_since_the_last_one():
    done = [1]
    sampler = RankSampler(lambda: done[0], "/torch/distributed")
    assert sampler.is_due(5.0), "the first comparison begins a window"
    before = {0: status(0, 1, 0, 0), 1: status(1, 1, 0, 0)}
    assert sampler.compare(before, 5.0) is None
    done[0] = STEPS
    assert not sampler.is_due(60.0), "too few steps"
    done[0] = 1 + STEPS
    assert not sampler.is_due(6.0), "too short a time"
    assert sampler.is_due(60.0)
    line = sampler.compare({0: status(0, 101, 800), 1: status(1, 101, 300)}, 60.0)
    assert line is not None
    assert line.startswith("In the last 100 steps (55 s) the others waited for rank 1 in 50% of the time")
    assert "rank 1 (node-0) is most often at t.py:1 `f()`" in line
    assert sampler.report == {"system/straggler_share": 0.5, "system/straggler_rank": 1}
    even = {0: status(0, 201, 1300, 2000), 1: status(1, 201, 800, 2000)}
    assert sampler.compare(even, 120.0) is None
    assert sampler.report == {"system/straggler_share": 0.0, "system/straggler_rank": -1}


def test_nothing_is_compared_while_a_rank_has_no_status():
    sampler = RankSampler(lambda: 1, "/torch/distributed")
    assert sampler.compare({0: status(0, 1, 0), 1: None}, 0.0) is None
    assert sampler.is_due(0.0), "no window has begun"


def test_statuses_of_an_earlier_run_are_not_compared():
    sampler = RankSampler(lambda: 1, "/torch/distributed", run=2)
    assert sampler.compare({0: status(0, 1, 0), 1: status(1, 320, 0)}, 0.0) is None
    assert sampler.is_due(0.0), "no window has begun"


def test_samples_leave_the_random_numbers_of_the_script_as_they_are():
    before = random.getstate()
    RankSampler(lambda: 1, "/torch/distributed").pause()
    assert random.getstate() == before


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
