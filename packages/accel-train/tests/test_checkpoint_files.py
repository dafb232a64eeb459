"""A file that is hashed while it is read: its bytes and its checksum, whatever the order of the reads."""

from __future__ import annotations

import io
import os
import threading
import time

import pytest
import torch
import xxhash
from hypothesis import example, given
from hypothesis import strategies as st

from accel_train.checkpoint.files import HashedBytes, HashedReader

SIZE = 5_000_000
STEPS = st.lists(st.tuples(st.integers(0, SIZE + 10), st.integers(0, SIZE)), max_size=8)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("hashed") / "file"
    path.write_bytes(os.urandom(SIZE))
    return path


NEEDS_PREADV = pytest.mark.skipif(not hasattr(os, "preadv"), reason="needs reads at a position")


@pytest.mark.parametrize("positioned", [pytest.param(True, marks=NEEDS_PREADV), False])
@given(steps=STEPS)
@example(steps=[(0, SIZE - 1), (SIZE + 1, 0)])
def test_reads_in_any_order_give_the_bytes_and_the_checksum_of_the_file(path, positioned, steps):
    content = path.read_bytes()
    with HashedReader(path, positioned=positioned) as file:
        for begin, count in steps:
            file.seek(begin)
            assert file.read(count) == content[begin : begin + count]
            assert file.tell() == min(max(begin, SIZE), begin + count)
        record = file.finish()
    assert record.size == SIZE
    assert record.checksum == xxhash.xxh3_64(content).hexdigest()


def test_a_file_that_cannot_be_opened_leaves_nothing_to_close(tmp_path):
    reader = HashedReader.__new__(HashedReader)
    with pytest.raises(FileNotFoundError):
        reader.__init__(tmp_path / "absent")
    reader.close()
    assert reader.closed


@pytest.fixture
def reads(monkeypatch):
    """The number of bytes of every read at a position."""
    preadv, counts = os.preadv, []

    def counting(*arguments):
        counts.append(preadv(*arguments))
        return counts[-1]

    monkeypatch.setattr(os, "preadv", counting)
    return counts


@NEEDS_PREADV
def test_what_is_read_in_order_is_not_read_again(path, reads):
    with HashedReader(path) as file:
        file.read(SIZE)
        file.finish()
    assert sum(reads) == SIZE


@NEEDS_PREADV
def test_a_file_of_torch_is_read_once_but_for_its_ends(tmp_path, reads):
    path = tmp_path / "state.bin"
    state = {name: torch.randn(1000, 700) for name in "abcde"}
    torch.save(state, path)
    with HashedReader(path) as file:
        loaded = torch.load(file, weights_only=True)
        record = file.finish()
    assert all(torch.equal(loaded[name], state[name]) for name in state)
    assert record.checksum == xxhash.xxh3_64(path.read_bytes()).hexdigest()
    assert sum(reads) < path.stat().st_size + 20_000


def test_a_file_that_gets_shorter_while_it_is_read_is_an_error(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(SIZE))
    with HashedReader(path) as file:
        os.truncate(path, SIZE // 2)
        with pytest.raises(OSError, match=rf"ends at byte {SIZE // 2}, not {SIZE}"):
            file.read(SIZE)
        file.seek(0)
        assert len(file.read(10)) == 10


def test_positions_are_counted_as_in_any_file(path):
    with HashedReader(path) as file, path.open("rb") as plain:
        for offset, whence in [(5, io.SEEK_SET), (7, io.SEEK_CUR), (-3, io.SEEK_CUR), (-9, io.SEEK_END)]:
            assert file.seek(offset, whence) == plain.seek(offset, whence)
            assert file.read(4) == plain.read(4)


def test_a_small_file_is_hashed_in_memory(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"0123456789")
    with HashedBytes(path) as file:
        assert file.read(3) == b"012"
        record = file.finish()
    assert record.size == 10
    assert record.checksum == xxhash.xxh3_64(b"0123456789").hexdigest()


@NEEDS_PREADV
def test_both_threads_of_a_long_read_have_ended_when_it_fails(path, monkeypatch):
    main, begun, ended = threading.current_thread(), threading.Event(), []

    def failing_here(descriptor, buffers, position):
        del descriptor
        if threading.current_thread() is main:
            begun.wait()
            raise OSError("the disk has failed")
        begun.set()
        time.sleep(0.2)  # the other thread would be gone by then
        ended.append(position)
        return sum(map(len, buffers))

    monkeypatch.setattr(os, "preadv", failing_here)
    with HashedReader(path) as file:
        with pytest.raises(OSError, match="the disk has failed"):
            file.read(SIZE)
        assert len(ended) == 1
