"""Random programs of streams: where the late device reports no race, every schedule gives the same values."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from accel_state.testing import late_device
from accel_state.testing.async_memory import storage_id

STREAMS = BUFFERS = EVENTS = 3

stream = st.integers(0, STREAMS - 1)
buffer = st.integers(0, BUFFERS - 1)
event = st.integers(0, EVENTS - 1)
statement = st.one_of(
    st.tuples(st.just("upload"), stream, buffer, buffer),
    st.tuples(st.just("download"), stream, buffer, buffer),
    st.tuples(st.just("add"), stream, buffer, buffer),
    st.tuples(st.just("record"), stream, event),
    st.tuples(st.just("wait"), stream, event),
    st.tuples(st.just("wait stream"), stream, stream),
    st.tuples(st.just("wait on the host"), event),
    st.tuples(st.just("wait for all"), stream),
    st.tuples(st.just("free"), stream, buffer),
    st.tuples(st.just("record stream"), stream, buffer),
    st.tuples(st.just("host writes"), buffer, st.integers(0, 9)),
    st.tuples(st.just("host reads"), buffer),
)


class Program:
    """Runs statements on a device, and keeps what the host and operators saw."""

    def __init__(self, device):
        self.device = device
        self.streams = [device.current_stream(), *(device.new_stream() for _ in range(STREAMS - 1))]
        self.events = [device.new_event() for _ in range(EVENTS)]
        self.host = [device.pinned(4).fill_(number) for number in range(BUFFERS)]
        self.buffers = [device.empty(4).fill_(10 + number) for number in range(BUFFERS)]
        device.synchronize()
        self.seen = []

    def run(self, name, *operands):
        getattr(self, name.replace(" ", "_"))(*operands)

    def upload(self, stream, target, source):
        with self.device.on(self.streams[stream]):
            self.device.copy_(self.buffers[target], self.host[source])

    def download(self, stream, target, source):
        with self.device.on(self.streams[stream]):
            self.device.copy_(self.host[target], self.buffers[source])

    def add(self, stream, target, source):
        with self.device.on(self.streams[stream]):
            self.buffers[target].add_(self.buffers[source])

    def record(self, stream, event):
        self.events[event].record(self.streams[stream])

    def wait(self, stream, event):
        self.streams[stream].wait_event(self.events[event])

    def wait_stream(self, stream, other):
        self.streams[stream].wait_stream(self.streams[other])

    def wait_on_the_host(self, event):
        self.events[event].synchronize()

    def wait_for_all(self, stream):
        self.streams[stream].synchronize()

    def record_stream(self, stream, buffer):
        self.device.record_stream(self.buffers[buffer], self.streams[stream])

    def free(self, stream, buffer):
        self.buffers[buffer] = None
        with self.device.on(self.streams[stream]):
            self.buffers[buffer] = self.device.empty(4).fill_(20 + buffer)

    def host_writes(self, buffer, value):
        self.host[buffer].fill_(value)

    def host_reads(self, buffer):
        self.seen.append(self.host[buffer].clone().tolist())

    def finish(self):
        self.device.synchronize()
        return [*self.seen, *(tensor.tolist() for tensor in (*self.host, *self.buffers))]


def outcome(program, schedule):
    """The values that a program ends with, and whether it has races."""
    with late_device(schedule) as device:
        run = Program(device)
        for words in program:
            run.run(*words)
        values = run.finish()
        races = len(device.races)
        device.races.clear()
    return values, races


@settings(deadline=None, max_examples=300)
@given(st.lists(statement, max_size=12))
def test_a_program_without_races_gives_the_same_values_under_every_schedule(program):
    late, races = outcome(program, "late")
    early, same = outcome(program, "early")
    assert (races > 0) == (same > 0)
    if not races:
        assert late == early


@settings(deadline=None, max_examples=100)
@given(st.lists(statement, max_size=12))
def test_a_program_that_waits_after_every_statement_has_no_races(program):
    with late_device() as device:
        run = Program(device)
        for words in program:
            if words[0] != "free":
                run.run(*words)
                device.synchronize()
        run.finish()


@settings(deadline=None)
@given(st.lists(st.integers(0, 64), min_size=1, max_size=20), st.data())
def test_memory_of_two_living_tensors_never_overlaps(sizes, data):
    with late_device() as device:
        living = []
        for size in sizes:
            with device.on(data.draw(st.sampled_from([device.current_stream(), device.new_stream()]))):
                living.append(device.empty(size).fill_(len(living) % 100))
            if data.draw(st.booleans()):
                living.pop(data.draw(st.integers(0, len(living) - 1)))
        spans = sorted((t.data_ptr(), t.data_ptr() + t.numel()) for t in living if t.numel())
        assert all(one[1] <= other[0] for one, other in pairwise(spans))
        assert len({storage_id(tensor) for tensor in living}) == len(living)
