from __future__ import annotations

import threading
import time

import pytest
from torch.distributed import HashStore, PrefixStore, Store

from accel_state import hang_monitor
from accel_state.errors import DistributedOperationException, StalledCollectiveError
from accel_state.hang_monitor import HangMonitor
from accel_state.rank_status import RankStatus
from accel_train.checkpoint import agreement
from accel_train.checkpoint.agreement import AbsentRankError, StoreAllGather, StragglerMonitor


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


class EmptyStore(Store):
    """A store without anything in it, which remembers what is asked for."""

    def __init__(self):
        super().__init__()
        self.asked = []

    def check(self, keys):
        self.asked += keys
        return False


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


def test_a_rank_that_waits_for_rank_0_asks_for_no_other() -> None:
    store = EmptyStore()
    monitor = HangMonitor(store, rank=700, world_size=1000, limit=100.0)
    lookout = StragglerMonitor("save", monitor, rank=700, world_size=1000, compare_locations=True)
    lookout.poll([0])
    assert set(store.asked) == {"accel/hang_monitor/0"}


def test_that_rank_0_has_ended_is_said_with_where_it_and_this_rank_were() -> None:
    monitor = monitor_of(HashStore(), 5, 8, exited=True, collective=3)
    lookout = StragglerMonitor("save_state()", monitor, rank=5, world_size=8, compare_locations=True)
    message = r"save_state\(\) must be called on every rank, but rank 0 has ended: .*rank 0 has left after 3"
    with pytest.raises(DistributedOperationException, match=message):
        lookout.poll([0])


def test_a_rank_in_another_collective_is_given_some_time(monkeypatch) -> None:
    monitor = monitor_of(HashStore(), 1, 2, inside=True, collective=4)
    lookout = StragglerMonitor("save", monitor, rank=1, world_size=2, compare_locations=True)
    lookout.poll([0])
    monkeypatch.setattr(agreement, "STUCK_S", 0.01)
    time.sleep(0.02)
    with pytest.raises(DistributedOperationException, match=r"rank 0 waits elsewhere: .*a\.py:1 `f\(\)`"):
        lookout.poll([0])


def test_what_rank_0_finds_out_is_heard_by_all_who_wait(monkeypatch) -> None:
    monkeypatch.setattr(agreement, "POLL_S", 0.0)
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


def test_on_a_device_a_rank_that_does_not_move_after_a_later_collective_is_elsewhere(monkeypatch) -> None:
    monitor = monitor_of(HashStore(), 1, 2, inside=False, collective=4)
    lookout = StragglerMonitor("save", monitor, rank=1, world_size=2, compare_locations=True)
    monkeypatch.setattr(agreement, "STUCK_ASYNC_S", 0.01)
    lookout.poll([0])
    time.sleep(0.02)
    lookout.poll([0])  # on the CPU it may compute for long
    monitor.asynchronous = True
    lookout.poll([0])
    time.sleep(0.02)
    with pytest.raises(AbsentRankError, match="rank 0 waits elsewhere"):
        lookout.poll([0])


def test_a_call_on_rank_0_alone_is_undone_and_noticed_at_once_the_next_time(monkeypatch) -> None:
    monkeypatch.setattr(agreement, "POLL_S", 0.0)
    monkeypatch.setattr(agreement, "STUCK_S", 0.3)
    store = HashStore()
    monitor = HangMonitor(store, rank=0, world_size=2, limit=100.0)
    status = RankStatus(rank=1, heartbeat=1, location="b.py:7", source="g()", inside=True, collective=1)
    monitor._store.set("1", status.to_text())
    monkeypatch.setattr(hang_monitor, "_active", monitor)
    gather = StoreAllGather(store, rank=0, world_size=2, channel="test", in_main_thread=True)
    waited = []
    for _ in range(2):
        began = time.monotonic()
        with pytest.raises(AbsentRankError):
            gather.exchange("save", "x")
        waited.append(time.monotonic() - began)
        assert monitor.count == 0
        assert not store.check(["accel/checkpoint/test/1/0"])
    assert waited[1] < 0.3 <= waited[0]


def test_where_another_rank_has_given_up_the_first_exchange_says_so(monkeypatch) -> None:
    monitor = HangMonitor(HashStore(), rank=1, world_size=2, limit=100.0)
    monitor.diagnosis = "`gather` did not complete"
    monkeypatch.setattr(hang_monitor, "_active", monitor)
    gather = StoreAllGather(HashStore(), rank=1, world_size=2, channel="test", in_main_thread=True)
    with pytest.raises(StalledCollectiveError, match="`gather` did not complete"):
        gather.exchange("save", "x")


def test_rank_0_that_waits_for_a_third_rank_is_not_elsewhere(monkeypatch) -> None:
    monkeypatch.setattr(agreement, "POLL_S", 0.0)
    monkeypatch.setattr(agreement, "STUCK_S", 0.05)
    store = HashStore()
    monitor = monitor_of(store, 1, 3, inside=True, collective=1)
    monkeypatch.setattr(hang_monitor, "_active", monitor)
    gather = StoreAllGather(store, rank=1, world_size=3, channel="test", in_main_thread=True)
    values = PrefixStore("accel/checkpoint/test/1", store)
    values.set("0", "0")  # rank 0 is there, and rank 2 comes after half a second
    threading.Timer(0.5, values.set, ["all", "[0, 1, 2]"]).start()
    assert gather.exchange("save", 1) == [0, 1, 2]
