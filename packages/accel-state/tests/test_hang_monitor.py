from __future__ import annotations

import logging
import sys
import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import HashStore

from accel_state import hang_monitor
from accel_state.errors import StalledCollectiveError
from accel_state.hang_monitor import collective_scope, transport_errors_explained
from accel_state.rank_status import RankStatus, call_site, format_statuses

TIMED_OUT = RuntimeError("[/src/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 4ms. Or so")


@pytest.fixture
def store():
    return HashStore()


@pytest.fixture(autouse=True)
def nothing_left(monkeypatch):
    monkeypatch.setattr(hang_monitor, "INTERVAL_S", 0.05)
    yield
    hang_monitor.end()
    assert not [thread for thread in threading.enumerate() if thread.name == "accel-hang-monitor"]


def until(condition):
    while not condition():
        time.sleep(0.01)


def other_rank(store, **told) -> hang_monitor.HangMonitor:
    """Rank 1, which has posted one status."""
    other = hang_monitor.HangMonitor(store, rank=1, world_size=2, limit=0.5)
    other._store.set("1", RankStatus(rank=1, heartbeat=1, **told).to_text())
    return other


def begin(store, limit=0.5, **options):
    hang_monitor.begin(store, rank=0, world_size=2, limit=timedelta(seconds=limit), **options)
    active = hang_monitor._active
    assert active is not None
    return active


def test_a_process_alone_has_no_thread_and_no_notes(store):
    hang_monitor.begin(store, rank=0, world_size=1, limit=timedelta(seconds=1))
    assert hang_monitor._active is None
    with collective_scope("gather"):
        pass


def test_a_monitor_can_have_another_limit(store, caplog):
    monitor = begin(store, limit=1000)
    monitor.set_limit(0.2)
    other_rank(store)
    with collective_scope("all_reduce"):
        until(lambda: "(limit 0 s): " in caplog.text)


def test_every_region_is_one_collective_and_regions_inside_belong_to_it(store):
    active = begin(store)
    for _ in range(2):
        with collective_scope("gather"), collective_scope("all_gather"):
            assert active.slot is not None
    assert active.slot is None
    assert active.count == 2


def test_the_posted_place_is_the_line_of_the_caller(store):
    active = begin(store)
    with collective_scope("gather"):
        until(lambda: (status := active.statuses([0])[0]) is not None and status.inside)
        status = active.statuses([0])[0]
    assert status is not None
    assert status.location.rpartition(":")[0].endswith("test_hang_monitor.py")
    assert status.source.startswith("until(lambda: (status := ")


def test_an_error_of_the_backend_says_where_everyone_is(store):
    other_rank(store, location="eval.py:41", source="gather(preds)", collective=7)
    begin(store)
    with pytest.raises(StalledCollectiveError) as raised, collective_scope("all_reduce"):
        raise TIMED_OUT
    message = str(raised.value)
    assert message.startswith("`all_reduce` did not complete: ")
    assert "with pytest.raises(StalledCollectiveError) as raised" in message
    assert "rank 1 is at eval.py:41 `gather(preds)` (in no collective, after 7, no longer answers)" in message
    assert message.endswith(f"Rank 0 heard from its backend: {TIMED_OUT}")
    assert raised.value.__cause__ is TIMED_OUT
    assert isinstance(raised.value, TimeoutError)


def test_a_disagreement_of_ranks_is_explained_too(store):
    begin(store)
    with pytest.raises(StalledCollectiveError, match=r"preamble"), collective_scope("all_reduce"):
        raise RuntimeError("[enforce fail at gloo/transport/tcp/pair.cc:446] op.preamble.length <= op.nbytes")


OF_THE_PROGRAM = [
    RuntimeError("shapes differ"),
    RuntimeError("HTTP request timed out while fetching tokenizer"),
    RuntimeError("NCCL is mentioned: Connection reset by peer"),
    RuntimeError("could not open [/src/gloo/transport/tcp/pair.cc:81]"),
    TimeoutError("timed out"),
    ValueError("[/src/gloo/transport/tcp/pair.cc:81] Timed out"),
    KeyError("x"),
]


@pytest.mark.parametrize("error", OF_THE_PROGRAM)
@pytest.mark.parametrize("scope", [collective_scope, transport_errors_explained])
def test_errors_of_the_program_pass_unchanged(store, error, scope):
    active = begin(store)
    with pytest.raises(type(error)) as raised, scope("backward"):
        raise error
    assert raised.value is error
    assert active.diagnosis is None, "other ranks would read the diagnosis of a stall"
    with scope("backward"):
        pass


@pytest.mark.parametrize("kind", [dist.DistBackendError, dist.DistNetworkError, dist.DistStoreError])
def test_what_torch_raises_for_the_transport_is_a_stall(store, kind):
    begin(store)
    with pytest.raises(StalledCollectiveError), collective_scope("all_reduce"):
        raise kind("NCCL error: remote process exited or there was a network error")


def test_a_stall_in_mixed_code_is_explained_but_no_collective(store):
    active = begin(store)
    told = pytest.raises(StalledCollectiveError, match="`pipeline` did not complete")
    with told, transport_errors_explained("pipeline"):
        assert active.slot is None
        raise TIMED_OUT
    assert active.count == 0


def test_once_a_rank_has_given_up_the_others_fail_at_their_next_collective(store, caplog):
    mine = begin(store)
    other = other_rank(store)
    diagnosis = other._store.compare_set("diagnosis", "", "`gather` did not complete: rank 0 is elsewhere.")
    until(lambda: mine.diagnosis is not None)
    with (
        pytest.raises(StalledCollectiveError, match="rank 0 is elsewhere"),
        collective_scope("all_reduce"),
    ):
        pytest.fail("the region was entered")
    assert diagnosis.decode() in caplog.text


def test_all_ranks_that_give_up_tell_the_story_of_the_first(store):
    other = other_rank(store)
    begin(store)
    other._store.set("diagnosis", "`gather` did not complete: first story.")
    with (
        pytest.raises(StalledCollectiveError, match="first story"),
        collective_scope("all_reduce"),
    ):
        raise TIMED_OUT


def test_one_rank_reads_where_all_are_and_the_others_wait_for_its_story(store):
    other = other_rank(store)
    begin(store)
    other._store.add("collecting", 1)

    def tell():
        until(lambda: int(other._store.add("collecting", 0)) > 1)
        other._store.set("diagnosis", "`gather` did not complete: a later story.")

    thread = threading.Thread(target=tell)
    thread.start()
    with pytest.raises(StalledCollectiveError, match="a later story"), collective_scope("all_reduce"):
        raise TIMED_OUT
    thread.join()


def test_a_rank_whose_collector_has_left_tells_its_own_story(store):
    other = other_rank(store)
    begin(store)
    other._store.add("collecting", 1)
    with (
        pytest.raises(StalledCollectiveError, match=r"`all_reduce` did not complete: .*rank 1 is at"),
        collective_scope("all_reduce"),
    ):
        raise TIMED_OUT


@pytest.mark.parametrize(("world_size", "seconds"), [(2, 0.05), (1024, 1.024), (16384, 16.384)])
def test_all_ranks_together_post_a_thousand_times_a_second_at_most(store, world_size, seconds):
    monitor = hang_monitor.HangMonitor(store, rank=1, world_size=world_size, limit=600)
    assert monitor._interval == seconds


def test_a_long_wait_is_warned_about_again_and_again(store, caplog):
    other_rank(store, location="eval.py:41", source="gather(preds)")
    begin(store)
    with collective_scope("all_reduce"):
        until(lambda: caplog.text.count("Waiting for") > 1)
    assert " s (limit 0 s): " in caplog.text
    assert "eval.py:41" in caplog.text


def test_rank_0_warns_of_others_that_wait_for_it(store, caplog):
    other_rank(store, location="eval.py:41", source="gather(preds)", inside=True, collective=1)
    begin(store)
    until(lambda: "rank 1 is at eval.py:41 `gather(preds)` (collective 1)" in caplog.text)


def test_work_of_the_device_that_nobody_waits_for_in_a_region_is_warned_about_near_the_limit(store, caplog):
    begin(store, asynchronous=True)
    threading.Event().wait(2)  # one line, longer than the limit
    until(lambda: "Waiting for" in caplog.text)


class Logged(logging.Handler, threading.Event):
    """Set as soon as something is logged; waited for in one line."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)
        threading.Event.__init__(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.set()


@pytest.fixture
def logged(monkeypatch):
    monkeypatch.setattr(hang_monitor, "WARN_AFTER_S", 0.2)
    handler = Logged()
    hang_monitor.logger.addHandler(handler)
    yield handler
    hang_monitor.logger.removeHandler(handler)


@pytest.mark.parametrize("last_words", [{"collective": 0}, {"collective": 1, "exited": True}])
def test_a_rank_whose_device_waits_for_a_rank_that_is_behind_warns_long_before_the_limit(
    store, caplog, logged, last_words
):
    other_rank(store, location="eval.py:41", source="load(batch)", **last_words)
    begin(store, limit=1e6, asynchronous=True)
    with collective_scope("backward"):
        pass
    logged.wait()  # as `.item()` waits for the device
    until(lambda: "(limit 1000000 s): " in caplog.text)
    assert "logged.wait()  # as" in caplog.text


def test_a_rank_that_computes_for_long_while_the_others_are_as_far_warns_nobody(store, logged):
    other_rank(store, collective=1)
    active = begin(store, limit=1e6, asynchronous=True)
    with collective_scope("backward"):
        pass
    has_waited = threading.Event()

    def wait():
        until(lambda: any(time.monotonic() - since > 1 for _, since in active._unchanged.copy().values()))
        has_waited.set()

    threading.Thread(target=wait, daemon=True).start()
    has_waited.wait()  # in one line
    assert not logged.is_set()


def test_a_rank_that_ends_says_good_bye(store):
    other = other_rank(store)
    begin(store)
    hang_monitor.end()
    place = other.statuses([0])[0]
    assert place is not None
    assert place.exited


def test_rank_0_waits_a_moment_for_the_others_before_it_takes_the_store_away(store):
    mine = begin(store)
    other = other_rank(store)
    mine.diagnosis = "of which the other rank must hear"  # so rank 0 waits longer
    thread = threading.Thread(target=lambda: hang_monitor.end(closing=True))
    thread.start()
    until(lambda: other._store.check(["closing"]))
    assert thread.is_alive()
    other._store.set("1", RankStatus(rank=1, exited=True).to_text())
    thread.join()


def test_the_diagnosis_of_an_earlier_monitor_is_dropped(store):
    other_rank(store)._store.set("diagnosis", "old")
    active = begin(store)
    assert not active._store.check(["diagnosis"])


def test_a_store_that_is_gone_is_said_and_ends_the_thread(store, monkeypatch):
    active = begin(store)

    def gone(*args):
        raise RuntimeError("Broken pipe")

    monkeypatch.setattr(active, "_post", gone)
    monkeypatch.setattr(active, "statuses", gone)
    until(lambda: not active._thread.is_alive())
    with (
        pytest.raises(StalledCollectiveError, match=r"store that knows .* is gone"),
        collective_scope("gather"),
    ):
        raise TIMED_OUT


def test_a_store_that_cannot_do_its_part_does_not_stop_the_run(caplog):
    class Poor(HashStore):
        def clone(self):
            raise NotImplementedError("no clone")

    hang_monitor.begin(Poor(), rank=0, world_size=2, limit=timedelta(seconds=1))
    assert hang_monitor._active is None
    assert "no clone" in caplog.text
    with collective_scope("gather"):
        pass


def test_the_location_of_the_main_thread_is_read_from_another_thread():
    here = "thread.join()  # the main thread is here"
    main = threading.get_ident()
    thread = threading.Thread(target=lambda: until(lambda: call_site(sys._current_frames()[main])[1] == here))
    thread.start()
    thread.join()  # the main thread is here


def test_a_place_without_source_is_named_by_its_function():
    scope = {"call_site": call_site, "sys": sys}
    exec(compile("def lost():\n    return call_site(sys._getframe())", "<typed>", "exec"), scope)
    assert scope["lost"]() == ("<typed>:2", "lost()")
    lost = scope["lost"]
    lost.__code__ = lost.__code__.replace(co_linetable=b"")  # as some instructions, it belongs to no line
    assert lost() == ("<typed>:1", "lost()")


def test_no_frame_is_no_place():
    assert call_site(None) == ("", "")


@given(
    st.lists(
        st.one_of(
            st.none(),
            st.builds(
                RankStatus,
                rank=st.just(0),
                location=st.sampled_from(["a.py:1", "b.py:2"]),
                source=st.just("f({x})"),
                collective=st.integers(0, 2),
                inside=st.booleans(),
                exited=st.booleans(),
            ),
        ),
        min_size=1,
        max_size=12,
    )
)
def test_every_rank_is_in_the_explanation_exactly_once(places):
    named: list[int] = []
    for part in format_statuses(dict(enumerate(places))).split("; "):
        words = part.split(" ")
        assert words[0] in {"rank", "ranks"}
        for word in words[1:]:
            if not word.rstrip(",").replace("-", "").isdigit():
                break
            first, _, last = word.rstrip(",").partition("-")
            named.extend(range(int(first), int(last or first) + 1))
            if not word.endswith(","):
                break
    assert sorted(named) == list(range(len(places)))


def test_a_status_survives_the_store():
    place = RankStatus(rank=3, heartbeat=2, location="ü.py:1", source='print("{")', collective=4, inside=True)
    assert RankStatus.from_text(place.to_text().encode()) == place
