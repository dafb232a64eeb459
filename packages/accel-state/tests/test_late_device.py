"""The late device keeps the rules of streams, and no more: what the rules do not promise goes wrong."""

from __future__ import annotations

import gc
import queue
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from accel_state.streams import device_streams, synchronize
from accel_state.testing import RaceError, late_device

CPU = torch.device("cpu")
VALUES = torch.arange(1.0, 5.0)

both = pytest.mark.parametrize("schedule", ["late", "early"])


def host_buffer(device, values=VALUES):
    return device.pinned(values.nbytes).view(values.dtype).copy_(values)


def device_buffer(device, values=VALUES):
    return device.empty(values.nbytes).view(values.dtype)


def found_by(device):
    """Take the races that were found so far."""
    races = list(device.races)
    device.races.clear()
    return races


def test_the_cpu_has_streams_within_the_block_only():
    with late_device() as device:
        assert device_streams(CPU) is device
    assert device_streams(CPU) is None


@both
def test_an_upload_with_all_of_its_ordering_passes(schedule):
    with late_device(schedule) as device:
        side, done = device.new_stream(), device.new_event()
        target = device_buffer(device)
        side.wait_stream(device.current_stream())
        device.record_stream(target, side)
        with device.on(side):
            device.copy_(target, host_buffer(device))
        done.record(side)
        device.current_stream().wait_event(done)
        assert torch.equal(target * 2, VALUES * 2)


def test_without_a_wait_the_values_are_poison_and_both_places_are_reported():
    with late_device() as device:
        side = device.new_stream()
        target = device_buffer(device)
        side.wait_stream(device.current_stream())
        device.record_stream(target, side)
        with device.on(side):
            device.copy_(target, host_buffer(device))  # the copy
        assert (target * 2).isnan().all()  # the operator
        (race,) = found_by(device)
    assert "aten::mul reads bytes 0 to 16 on the default stream" in race.second
    assert "a copy writes bytes 0 to 16 on stream 2" in race.first
    assert all(__file__ in place for place in (race.first, race.second))


def upload_without_a_final_wait():
    with late_device() as device:
        target = device_buffer(device)
        side = device.new_stream()
        side.wait_stream(device.current_stream())
        device.record_stream(target, side)
        with device.on(side):
            device.copy_(target, host_buffer(device))
        target.mul(2)


def test_races_raise_at_the_end():
    with pytest.raises(RaceError, match=r"(?s)aten::mul reads .* is not ordered after.* a copy writes"):
        upload_without_a_final_wait()


def test_an_error_in_the_block_is_not_hidden_by_races():
    def fail():
        with late_device() as device, device.on(device.new_stream()):
            device.copy_(device_buffer(device), host_buffer(device))
            device.races.append("a race")
            raise KeyError

    with pytest.raises(KeyError):
        fail()


@both
def test_new_memory_may_still_be_in_use_by_the_current_stream(schedule):
    with late_device(schedule) as device:
        side = device.new_stream()
        target = device_buffer(device)
        with device.on(side):
            device.copy_(target, host_buffer(device))  # without side.wait_stream
        device.synchronize()
        (race,) = found_by(device)
    assert "a copy writes" in race.second
    assert "the allocation writes" in race.first


@both
def test_a_copy_that_overwrites_what_is_still_read_is_found(schedule):
    with late_device(schedule) as device:
        side, used = device.new_stream(), device.new_event()
        target = device_buffer(device).fill_(1)
        side.wait_stream(device.current_stream())
        used.record(device.current_stream())
        device.record_stream(target, side)
        target.sum()  # after the event
        side.wait_event(used)
        with device.on(side):
            device.copy_(target, host_buffer(device))
        device.synchronize()
        (race,) = found_by(device)
    assert "a copy writes" in race.second
    assert "aten::sum reads" in race.first


def test_an_early_copy_shows_a_use_after_the_release():
    with late_device("early") as device:
        side = device.new_stream()
        target = device_buffer(device).fill_(7)
        device.record_stream(target, side)
        side.wait_stream(device.current_stream())
        with device.on(side):
            device.copy_(target, host_buffer(device))
        assert torch.equal(target + 0, VALUES)  # 7 was meant
        assert len(found_by(device)) == 1


def test_memory_that_was_freed_is_handed_out_at_once_and_poisoned():
    with late_device() as device:
        first = device_buffer(device).fill_(1)
        address = first.data_ptr()
        del first
        second = device_buffer(device)
        assert second.data_ptr() == address
        assert second.isnan().all()


def test_without_record_stream_a_late_copy_lands_in_somebody_elses_memory():
    with late_device() as device:
        side = device.new_stream()
        target = device_buffer(device)
        side.wait_stream(device.current_stream())
        with device.on(side):
            device.copy_(target, host_buffer(device))
        del target
        other = device_buffer(device).fill_(9)
        device.synchronize()
        assert torch.equal(other, VALUES)  # 9 was meant
        (race,) = found_by(device)
    assert "without record_stream" in race.second
    assert "a copy writes" in race.first


@both
def test_with_record_stream_memory_waits_for_the_stream(schedule):
    with late_device(schedule) as device:
        side = device.new_stream()
        target = device_buffer(device)
        address = target.data_ptr()
        side.wait_stream(device.current_stream())
        with device.on(side):
            device.copy_(target, host_buffer(device))
        device.record_stream(target, side)
        del target
        other = device_buffer(device).fill_(9)
        assert (other.data_ptr() == address) is (schedule == "early")
        device.synchronize()
        assert torch.equal(other, torch.full((4,), 9.0))
        if schedule == "late":
            assert device_buffer(device).data_ptr() == address


@both
def test_memory_of_a_side_stream_needs_record_stream_for_its_readers(schedule):
    for recorded in (True, False):
        with late_device(schedule) as device:
            side = device.new_stream()
            with device.on(side):
                target = device_buffer(device)
                device.copy_(target, host_buffer(device))
            device.current_stream().wait_stream(side)
            assert torch.equal(target + 0, VALUES)
            if recorded:
                device.record_stream(target, device.current_stream())
            del target
            device.empty(0)
            assert len(found_by(device)) == (not recorded)


@both
def test_a_buffer_that_the_host_writes_too_soon_is_found(schedule):
    with late_device(schedule) as device:
        host, target = host_buffer(device), device_buffer(device)
        device.copy_(target, host)
        host.fill_(0)
        found = target + 0
        assert torch.equal(found, VALUES) is (schedule == "early")
        races = found_by(device)
    assert "aten::fill_ writes bytes 0 to 16 on the host" in races[0].second
    assert "a copy reads" in races[0].first


@both
@pytest.mark.parametrize("wait", ["event", "stream", "device", "seam", "query"])
def test_a_buffer_is_reused_after_the_host_has_waited(schedule, wait):
    with late_device(schedule) as device:
        host, target, done = host_buffer(device), device_buffer(device), device.new_event()
        device.copy_(target, host)
        done.record(device.current_stream())
        if wait == "event":
            done.synchronize()
        elif wait == "stream":
            device.current_stream().synchronize()
        elif wait == "device":
            device.synchronize()
        elif wait == "seam":
            synchronize(CPU)
        else:
            while not done.query():
                pass
        host.fill_(0)
        assert torch.equal(target + 0, VALUES)


def test_a_change_without_operators_in_another_thread_is_found():
    with late_device() as device:
        host, target = host_buffer(device), device_buffer(device)
        device.copy_(target, host)
        thread = threading.Thread(target=lambda: host.numpy().fill(0))
        thread.start()
        thread.join()
        device.synchronize()
        (race,) = found_by(device)
    assert "by the host" in race.second
    assert __file__ in race.first


def test_the_host_reads_poison_before_a_download_is_over():
    with late_device() as device:
        source = device_buffer(device).copy_(VALUES)
        host = host_buffer(device, torch.zeros(4))
        device.copy_(host, source)
        assert host.isnan().all()
        (race,) = found_by(device)
        assert "aten::isnan" in race.second or "on the host" in race.second
        device.synchronize()
        assert torch.equal(host, VALUES)


@both
def test_a_download_needs_what_was_computed_before(schedule):
    for waits in (True, False):
        with late_device(schedule) as device:
            source = device_buffer(device).copy_(VALUES)
            host, side = host_buffer(device), device.new_stream()
            if waits:
                side.wait_stream(device.current_stream())
            device.record_stream(source, side)
            with device.on(side):
                device.copy_(host, source)
            side.synchronize()
            assert len(found_by(device)) == (not waits)


@both
def test_a_parameter_is_not_stepped_before_it_is_downloaded(schedule):
    parameter = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    for waits in (True, False):
        with late_device(schedule) as device:
            side = device.new_stream()
            parameter.grad = torch.ones(4)
            optimizer.step()
            side.wait_stream(device.current_stream())
            host = device.pinned(16).view(torch.float32)
            with device.on(side):
                device.copy_(host, parameter.detach())
            if waits:
                device.current_stream().wait_stream(side)
            before = parameter.detach().clone()
            optimizer.step()
            side.synchronize()
            assert torch.equal(host, before) or not waits
            assert bool(found_by(device)) == (not waits)


def test_a_pinned_buffer_outlives_its_copies():
    with late_device() as device:
        host, target = host_buffer(device), device_buffer(device)
        address = host.data_ptr()
        device.copy_(target, host)
        del host
        assert device.pinned(16).data_ptr() != address
        assert torch.equal(target + 0, VALUES)
        device.synchronize()
        assert device.pinned(16).data_ptr() == address


@pytest.mark.parametrize("blocking", [True, False])
def test_plain_copies_between_pinned_and_device_memory_are_seen(blocking):
    with late_device() as device:
        host, target = host_buffer(device), device_buffer(device)
        target.copy_(host, non_blocking=not blocking)
        assert device.pending == (not blocking)
        device.synchronize()
        assert device.pending == 0


def test_a_copy_that_a_real_device_would_wait_for_is_refused():
    with late_device() as device, pytest.raises(ValueError, match="from unknown to device memory"):
        device.copy_(device_buffer(device), torch.zeros(4))


def test_disjoint_parts_of_a_buffer_do_not_race():
    with late_device() as device:
        side = device.new_stream()
        target = device.empty(32)
        side.wait_stream(device.current_stream())
        device.record_stream(target, side)
        with device.on(side):
            device.copy_(target[:16].view(torch.float32), host_buffer(device))
        target[16:].zero_()
        assert not device.races
        target[15:].zero_()
        assert len(found_by(device)) == 1


def test_streams_are_current_for_their_thread():
    with late_device() as device:
        side = device.new_stream()
        seen = []
        with device.on(side):
            thread = threading.Thread(target=lambda: seen.append(device.current_stream()))
            thread.start()
            thread.join()
            assert device.current_stream() is side
        assert seen == [device.current_stream()]


def test_operators_of_a_thread_that_is_watched_are_seen():
    with late_device() as device:
        side = device.new_stream()
        target = device_buffer(device).fill_(1)

        def work():
            with device.watch(), device.on(side):
                target.add_(1)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        (race,) = found_by(device)
        device.current_stream().wait_stream(side)
        assert torch.equal(target, torch.full((4,), 2.0))
    assert "aten::add_ writes" in race.second


def test_the_work_of_autograd_is_seen():
    with late_device() as device:
        side = device.new_stream()
        weight = device_buffer(device).copy_(VALUES).requires_grad_()
        loss = (weight * weight).sum()
        side.wait_stream(device.current_stream())
        with torch.no_grad(), device.on(side):
            device.copy_(weight, host_buffer(device))
        loss.backward()  # reads the weight
        assert any("aten::mul reads" in race.second for race in found_by(device))
        device.current_stream().wait_stream(side)
        del weight, loss
        gc.collect()


def test_an_event_that_was_never_recorded_is_reached():
    with late_device() as device:
        event = device.new_event()
        assert event.query()
        event.synchronize()
        device.current_stream().wait_event(event)


def test_a_wait_is_for_what_the_event_had_when_it_was_recorded():
    with late_device() as device:
        side, done = device.new_stream(), device.new_event()
        first, second = device_buffer(device), device_buffer(device)
        side.wait_stream(device.current_stream())
        with device.on(side):
            device.copy_(first, host_buffer(device))
            done.record(side)
            device.copy_(second, host_buffer(device))
        device.current_stream().wait_event(done)
        assert torch.equal(first + 0, VALUES)
        assert not device.races
        assert device.pending == 1
        device.synchronize()


def test_a_device_has_only_its_capacity():
    with late_device(capacity=64) as device:
        held = device.empty(48)
        with pytest.raises(torch.OutOfMemoryError, match=r"48 of 64 bytes of device 0 are in use: 32 more"):
            device.empty(32)
        del held
        first = device.empty(32).view(torch.float32).fill_(1)
        assert device.nbytes == 32
        second = first + 1  # what operators give takes memory, too
        assert device.nbytes == 64
        with pytest.raises(torch.OutOfMemoryError):
            second + 1
        del first
        assert torch.equal(second + 1, torch.full((8,), 3.0))


def test_only_so_much_host_memory_can_be_pinned():
    with late_device(pinned_capacity=100) as device:
        held = device.pinned(60)
        with pytest.raises(RuntimeError, match="120 bytes would be pinned, 100 can be"):
            device.pinned(60)
        del held
        device.pinned(100)
        assert device.host.pinned_peak == 100


@both
def test_a_copy_from_pageable_memory_is_done_when_it_returns(schedule):
    values = VALUES.clone()
    with late_device(schedule) as device:
        target, side = device_buffer(device), device.new_stream()
        side.wait_stream(device.current_stream())
        with device.on(side):
            device.copy_pageable_(target, values)
        values.fill_(0)
        assert torch.equal(target + 0, VALUES)
        device.record_stream(target, side)


def test_every_device_has_streams_and_memory_of_its_own():
    with late_device(devices=2, capacity=32) as device:
        other = device_streams(torch.device("cpu", 1))
        assert [device.index, other.index] == [0, 1]
        assert device_streams(CPU) is device
        here, there = device_buffer(device).fill_(1), device_buffer(other).fill_(2)
        with pytest.raises(RuntimeError, match=r"aten::add has tensors on devices \[0, 1\]"):
            here + there
        assert device.nbytes == other.nbytes == 16
        side = other.new_stream()
        with device.on(side):
            assert device_streams(CPU) is other  # a stream's context makes its device the current one
            assert other.current_stream() is side
        assert device_streams(CPU) is device
        assert other.current_stream() is other.streams[0]


def test_streams_of_two_devices_are_ordered_by_events_alone():
    for waits in (True, False):
        with late_device(devices=2) as device:
            other = device.host.devices[1]
            target = device_buffer(other)
            with other.on(side := other.new_stream()):
                side.wait_stream(other.streams[0])
                other.copy_(target, host_buffer(device))
            if waits:
                other.current_stream().wait_stream(side)
            found = target * 2  # on the second device, where its operand is
            assert torch.equal(found, VALUES * 2) is waits
            assert len(found_by(device)) == (not waits)
            other.record_stream(target, side)


def test_leaving_a_stream_makes_a_context_on_the_device_of_before():
    with late_device(devices=2) as device:
        other = device.host.devices[1]
        other.set_current()
        with other.on(other.new_stream()):
            pass
        assert device.host.contexts == {1}

        def work():
            with other.on(other.new_stream()):
                pass

        thread = threading.Thread(target=work)  # begins on the first device
        thread.start()
        thread.join()
        assert device.host.contexts == {0, 1}


def test_a_stream_is_no_context_for_two():
    with late_device() as device:
        side = device.new_stream()
        with side:
            assert device.current_stream() is side
            with pytest.raises(RuntimeError, match="the context of stream 2 is entered already"), side:
                pass
        with device.on(side), device.on(side):
            assert device.current_stream() is side
        assert device.current_stream() is device.streams[0]


def copy_in_a_thread(device, target, start):
    """Copy to a target on a new stream, in another thread; return the stream."""
    side = device.new_stream()
    side.wait_stream(device.current_stream())
    device.record_stream(target, side)

    def work():
        with device.on(side):
            device.copy_(target, host_buffer(device))

    start(work)
    return side


def by_a_thread(work):
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def by_a_future(work):
    with ThreadPoolExecutor(1) as pool:
        pool.submit(work).result()


def by_a_queue(work):
    results = queue.Queue()
    thread = threading.Thread(target=lambda: results.put(work()))
    thread.start()
    results.get()


def by_an_event(work):
    done = threading.Event()
    thread = threading.Thread(target=lambda: (work(), done.set()))
    thread.start()
    done.wait()


def by_nothing(work):
    """Wait by means that order nothing: what a thread has done may just not have happened yet."""
    done = []
    threading.Thread(target=lambda: (work(), done.append(None))).start()
    while not done:
        time.sleep(0.001)


@both
@pytest.mark.parametrize("start", [by_a_thread, by_a_future, by_a_queue, by_an_event, by_nothing])
def test_a_wait_covers_what_another_thread_has_handed_over(schedule, start):
    with late_device(schedule) as device:
        target = device_buffer(device)
        side = copy_in_a_thread(device, target, start)
        device.current_stream().wait_stream(side)
        assert torch.equal(target + 0, VALUES)
        assert bool(found_by(device)) is (start is by_nothing)


def test_memory_that_another_thread_still_gives_to_a_stream_is_not_freed_in_silence():
    with late_device() as device:
        target, side = device_buffer(device), device.new_stream()
        side.wait_stream(device.current_stream())

        def work(target=target):
            with device.on(side):
                device.copy_(target, host_buffer(device))

        by_nothing(work)
        device.current_stream().wait_stream(side)
        del target, work
        gc.collect()
        device.empty(0)
        (race,) = found_by(device)
    assert "without record_stream" in race.second


def test_what_threads_of_the_block_hand_over_at_its_end_is_ordered():
    handing_over = threading.Event()
    with ThreadPoolExecutor(1) as reader, ThreadPoolExecutor(1) as worker, late_device() as device:
        streams = device_streams(CPU)
        stream = streams.new_stream()

        def copy(target, source):
            with streams.on(stream):
                streams.copy_(target, source)

        def transfer():
            handing_over.wait()
            with streams.on(stream):
                target = streams.empty(VALUES.nbytes)
            reader.submit(copy, target, streams.pinned(VALUES.nbytes)).result()

        transferred = worker.submit(transfer)
        finish = device.finish

        def finish_during_a_transfer():
            handing_over.set()
            transferred.result()
            finish()

        device.finish = finish_during_a_transfer
