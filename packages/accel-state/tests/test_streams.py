"""The streams of a real accelerator: what they are made of, and what only one can show."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from accel_state.streams import DeviceStreams, device_streams


def accelerator(index=0):
    """Return a device that has streams."""
    return torch.device(torch.accelerator.current_accelerator().type, index)


def busy(streams):
    """Give the current stream some tenths of a second of work."""
    square = torch.ones(4096, 4096, device=streams.device)
    for _ in range(200):
        square = square @ square * 0
    return square


def test_a_stream_is_entered_twice_and_left_to_the_one_before():
    streams = DeviceStreams(torch.device("cpu", 0))  # torch.cpu has the functions, without effect
    before, side = streams.current_stream(), streams.new_stream()
    with streams.on(side), streams.on(side):
        assert streams.current_stream() is side
    assert streams.current_stream() is before


def test_without_streams_of_its_own_a_device_has_none():
    assert device_streams(torch.device("cpu")) is None
    assert device_streams(torch.device("mps")) is None


@pytest.mark.gpu
def test_the_host_blocks_on_an_event_and_does_not_spin():
    streams = device_streams(accelerator())
    busy(streams)
    streams.synchronize()
    done = streams.new_event()
    busy(streams)
    done.record(streams.current_stream())
    wall, own = time.perf_counter(), time.thread_time()
    done.synchronize()
    wall, own = time.perf_counter() - wall, time.thread_time() - own
    assert wall > 0.02  # there was something to wait for
    assert own < 0.5 * wall


@pytest.mark.gpu
def test_threads_share_one_stream():
    streams = device_streams(accelerator())
    side, before = streams.new_stream(), streams.current_stream()

    def work():
        for _ in range(200):
            with streams.on(side), streams.on(side):
                assert streams.current_stream() == side
                torch.ones(8, device=streams.device)
            assert streams.current_stream() != side

    with ThreadPoolExecutor(8, initializer=streams.set_current) as pool:
        for done in [pool.submit(work) for _ in range(8)]:
            done.result()
    assert streams.current_stream() == before


@pytest.mark.gpu
def test_an_event_orders_a_copy_on_a_stream_before_what_waits_for_it():
    streams = device_streams(accelerator())
    side, done = streams.new_stream(), streams.new_event()
    host = streams.pinned(64 << 20).fill_(7)
    assert done.query()
    for _ in range(5):
        with streams.on(side):
            target = streams.empty(host.numel())
            streams.copy_(target, host)
            done.record(side)
        current = streams.current_stream()
        current.wait_event(done)
        streams.record_stream(target, current)
        assert int(target[-1]) == 7
        with streams.on(side):
            streams.copy_pageable_(target[:8], torch.arange(8, dtype=torch.uint8))
        current.wait_stream(side)
        assert target[:8].tolist() == list(range(8))


@pytest.mark.gpu
def test_threads_of_a_rank_make_no_context_on_the_first_gpu():
    if torch.accelerator.current_accelerator().type != "cuda" or torch.accelerator.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    script = """
        import torch
        from concurrent.futures import ThreadPoolExecutor
        from accel_state.streams import device_streams

        torch.cuda.set_device(1)
        streams = device_streams(torch.device("cuda", 1))
        side = streams.new_stream()

        def work():
            with streams.on(side):
                streams.copy_(streams.empty(64), streams.pinned(64))
            return torch.cuda.current_device()

        with ThreadPoolExecutor(1, initializer=streams.set_current) as pool:
            print(pool.submit(work).result(), torch._C._cuda_hasPrimaryContext(0))
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["1", "False"]
