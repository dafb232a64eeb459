from __future__ import annotations

import threading
import time

import pytest
from torch.distributed import HashStore, PrefixStore

from accel_state import hang_monitor
from accel_state.errors import DistributedOperationException, StalledCollectiveError
from accel_state.hang_monitor import HangMonitor
from accel_state.rank_status import RankStatus
from accel_train.checkpoint import agreement, save
from accel_train.checkpoint.agreement import AbsentRankError, StoreAllGather


def all_gather(store, rank, world_size, monitor=None):
    return StoreAllGather(
        store,
        rank=rank,
        world_size=world_size,
        channel="test",
        in_main_thread=False,
        monitor=lambda: monitor,
    )


def on_all(world_size, body):
    """Run a body on simulated ranks; return what each returned or raised."""
    results = [None] * world_size

    def run(rank):
        try:
            results[rank] = body(rank)
        except DistributedOperationException as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def monitor_of(store, rank, world_size, **told):
    """A monitor that is not started, and what rank 0 has said."""
    monitor = HangMonitor(store, rank=rank, world_size=world_size, limit=100.0)
    monitor._store.set(
        "0", RankStatus(rank=0, heartbeat=1, location="a.py:1", source="f()", **told).to_text()
    )
    return monitor


def test_all_ranks_get_all_texts_in_rank_order_round_after_round() -> None:
    store = HashStore()
    gathers = [all_gather(store, rank, 8) for rank in range(8)]
    for number in range(3):
        texts = on_all(8, lambda rank, number=number: gathers[rank].exchange("save", f"{number}ü{rank}"))
        assert texts == [[f"{number}ü{rank}" for rank in range(8)]] * 8


@pytest.mark.parametrize("world_size", [8, 64])
def test_what_the_others_get_does_not_grow_with_ranks_that_say_the_same(world_size) -> None:
    store = HashStore()
    gathers = [all_gather(store, rank, world_size) for rank in range(world_size)]

    def exchange(rank):
        said = [f"the files of rank {rank}", ""]
        return gathers[rank].exchange("save", said, public=lambda rows: [[None, row[1]] for row in rows])

    first, *others = on_all(world_size, exchange)
    assert first == [[f"the files of rank {rank}", ""] for rank in range(world_size)]
    assert others == [[[None, ""]] * world_size] * (world_size - 1)
    assert len(store.get("accel/checkpoint/test/1/all")) == len(f'[[[null, ""], {world_size}]]')


def test_no_rank_but_0_gets_the_records_of_files_also_if_each_host_commits_its_own() -> None:
    rows = [[{f"rng_{rank}": {"size": 9, "digest": "x"}}, "", rank // 2 * 2] for rank in range(4)]
    assert save._for_other_ranks(rows) == [[{}, "", 0], [{}, "", 0], [{}, "", 2], [{}, "", 2]]


def test_the_store_does_not_fill_up() -> None:
    store = HashStore()
    gathers = [all_gather(store, rank, 4) for rank in range(4)]
    sizes = []
    for _ in range(5):
        on_all(4, lambda rank: gathers[rank].exchange("save", "x", last=True))
        sizes.append(store.num_keys())
    assert sizes[1:] == sizes[1:2] * 4


def test_rank_0_is_the_last_to_go() -> None:
    store = HashStore()
    left = []

    def body(rank):
        time.sleep(0.1 * rank)
        all_gather(store, rank, 3).exchange("save", "x", last=True)
        if rank == 0:
            left.append(store.add("accel/checkpoint/test/1/left", 0))

    on_all(3, body)
    assert left == [2]


def test_a_rank_that_waits_for_rank_0_asks_for_no_other(monkeypatch) -> None:
    monkeypatch.setattr(agreement, "POLL_S", 0.001)
    monkeypatch.setattr(agreement, "SILENT_S", 0.0)
    monitor = monitor_of(HashStore(), 5, 8)
    statuses, asked = monitor.statuses, []

    def recording(ranks):
        asked.append([*ranks])
        return statuses(ranks)

    monkeypatch.setattr(monitor, "statuses", recording)
    with pytest.raises(DistributedOperationException, match="rank 0 does not respond"):
        all_gather(HashStore(), 5, 8, monitor).exchange("save", "x")
    assert {rank for ranks in asked for rank in ranks} == {0, 5}


def test_that_rank_0_has_ended_is_said_with_where_it_and_this_rank_were(monkeypatch) -> None:
    monkeypatch.setattr(agreement, "POLL_S", 0.001)
    monitor = monitor_of(HashStore(), 5, 8, exited=True, collective=3)
    monkeypatch.setattr(hang_monitor, "_active", monitor)
    gather = StoreAllGather(HashStore(), rank=5, world_size=8, channel="test", in_main_thread=True)
    message = r"save_state\(\) must be called on every rank, but rank 0 has ended: .*rank 0 is gone after 3"
    with pytest.raises(DistributedOperationException, match=message):
        gather.exchange("save_state()", "x")


@pytest.mark.parametrize("inside", [True, False])
def test_a_rank_waits_for_rank_0_wherever_that_is(monkeypatch, inside) -> None:
    monkeypatch.setattr(agreement, "POLL_S", 0.001)
    monkeypatch.setattr(agreement, "STUCK_S", 0.0)
    store = HashStore()
    monitor = monitor_of(store, 1, 2, inside=inside, collective=42)
    monitor.asynchronous, statuses, polls = not inside, monitor.statuses, []

    def counting(ranks):
        polls.append(ranks)
        if len(polls) == 20:  # rank 0 comes
            PrefixStore("accel/checkpoint/test/1", store).set("all", "[[0, 1], [1, 1]]")
        return statuses(ranks)

    monkeypatch.setattr(monitor, "statuses", counting)
    monkeypatch.setattr(hang_monitor, "_active", monitor)
    gather = StoreAllGather(store, rank=1, world_size=2, channel="test", in_main_thread=True)
    assert gather.exchange("save", 1, alone="here") == [0, 1]


def test_what_rank_0_finds_out_is_heard_by_all_who_wait(monkeypatch) -> None:
    monkeypatch.setattr(agreement, "POLL_S", 0.001)
    monkeypatch.setattr(agreement, "SILENT_S", 0.0)
    store = HashStore()
    posted = PrefixStore("accel/hang_monitor", store)
    posted.set("2", RankStatus(rank=2, heartbeat=1, location="b.py:7", source="g()").to_text())

    def body(rank):
        monitor = None
        if rank == 0:  # which looks for the others at once: rank 1 is there, rank 2 never comes
            monitor = HangMonitor(store, rank=rank, world_size=3, limit=100.0)
            store.wait(["accel/checkpoint/test/1/1"])
        return None if rank == 2 else all_gather(store, rank, 3, monitor).exchange("save", "x")

    first, second, _ = on_all(3, body)
    assert "rank 2 does not respond" in str(first)
    assert str(second) == str(first)


@pytest.mark.parametrize("asynchronous", [True, False])
def test_rank_0_goes_on_alone_and_is_quicker_the_next_time(monkeypatch, asynchronous) -> None:
    monkeypatch.setattr(agreement, "POLL_S", 0.001)
    monkeypatch.setattr(agreement, "STUCK_S", 0.3)
    store = HashStore()
    monitor = HangMonitor(store, rank=0, world_size=2, limit=100.0)
    monitor.asynchronous = asynchronous
    status = RankStatus(
        rank=1, heartbeat=1, location="b.py:7", source="g()", inside=not asynchronous, collective=1
    )
    monitor._store.set("1", status.to_text())
    monkeypatch.setattr(hang_monitor, "_active", monitor)
    gather = StoreAllGather(store, rank=0, world_size=2, channel="test", in_main_thread=True)
    waited = []
    for _ in range(2):
        began = time.monotonic()
        with pytest.raises(AbsentRankError, match="rank 1 waits elsewhere"):
            gather.exchange("save", "x", alone="here")
        waited.append(time.monotonic() - began)
        assert monitor.count == 0
    assert waited[1] < 0.3 <= waited[0]


def test_ranks_that_come_late_hear_what_rank_0_has_done_alone(monkeypatch) -> None:
    monkeypatch.setattr(agreement, "POLL_S", 0.001)
    store = HashStore()
    monitor = HangMonitor(store, rank=0, world_size=3, limit=100.0)
    for rank in (1, 2):
        monitor._store.set(f"{rank}", RankStatus(rank=rank, exited=True).to_text())
    monkeypatch.setattr(hang_monitor, "_active", monitor)
    for alone in ("a", "b"):
        gather = StoreAllGather(store, rank=0, world_size=3, channel="test", in_main_thread=True)
        with pytest.raises(AbsentRankError, match="rank 1 has ended"):
            gather.exchange("save", "x", alone=alone)
    monkeypatch.setattr(hang_monitor, "_active", None)
    gathers = [gather, *(all_gather(store, rank, 3) for rank in (1, 2))]
    with pytest.raises(AbsentRankError, match="was called on rank 0 long before this rank"):
        gathers[1].exchange("save", "x", alone="b")
    for _ in range(2):  # of another operation, and with a rank that has come to none of them
        assert on_all(3, lambda rank: gathers[rank].exchange("load", rank)) == [[0, 1, 2]] * 3


def test_where_another_rank_has_given_up_the_first_exchange_says_so(monkeypatch) -> None:
    monitor = HangMonitor(HashStore(), rank=1, world_size=2, limit=100.0)
    monitor.diagnosis = "`gather` did not complete"
    monkeypatch.setattr(hang_monitor, "_active", monitor)
    gather = StoreAllGather(HashStore(), rank=1, world_size=2, channel="test", in_main_thread=True)
    with pytest.raises(StalledCollectiveError, match="`gather` did not complete"):
        gather.exchange("save", "x", alone="here")
