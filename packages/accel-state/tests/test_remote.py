"""Files on object stores: paths, reading by ranges, uploads in parts, requests that are repeated."""

from __future__ import annotations

import errno
import threading
from pathlib import Path

import fsspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel_state import remote
from accel_state.errors import SettingsError
from accel_state.files import any_path, local_path, open_regular, read_json
from accel_state.remote import RemoteFile, RemotePath, RemoteWriter, repeated


@pytest.fixture(autouse=True)
def files(monkeypatch):
    monkeypatch.setattr(remote, "PAUSE_S", 0.001)
    files = fsspec.filesystem("memory")
    files.store.clear()
    yield files
    files.store.clear()


def test_a_path_is_local_or_a_url():
    assert any_path("runs/7", "x") == Path("runs/7")
    assert any_path("file:///tmp/a", "x") == Path("/tmp/a")
    assert any_path("memory://bucket/a/", "x") == RemotePath("memory://bucket/a")
    assert any_path(Path("memory://bucket/a"), "x") == RemotePath("memory://bucket/a")
    assert any_path(RemotePath("memory://bucket/a"), "x") == RemotePath("memory://bucket/a")
    with pytest.raises(SettingsError, match=r"where='nowhere://a': fsspec has no file system"):
        any_path("nowhere://a", "where")
    with pytest.raises(SettingsError, match=r"logging_dir='s3://a'.*scheme 's3'.*needs a local folder"):
        local_path("s3://a", "logging_dir")


def test_paths_answer_as_paths_of_files_do(files):
    folder = RemotePath("memory://bucket/run")
    assert not folder.exists()
    (folder / "a.json").write_bytes(b'{"x": 1}')
    (folder / "inner" / "b.bin").write_bytes(b"12345")
    assert folder.is_dir()
    assert not folder.is_file()
    assert (folder / "a.json").is_file()
    assert sorted(path.name for path in folder.iterdir()) == ["a.json", "inner"]
    assert [path.name for path in folder.glob("*.json")] == ["a.json"]
    assert folder.sizes() == {"a.json": 8, "inner/b.bin": 5}
    assert read_json(folder / "a.json") == {"x": 1}
    with open_regular(folder / "inner" / "b.bin") as file:
        assert (file.read(2), file.tell(), file.read()) == (b"12", 2, b"345")
    before = (folder / "a.json").version()
    (folder / "a.json").copy_to(folder / "copy.json")
    assert (folder / "copy.json").read_text() == '{"x": 1}'
    (folder / "a.json").write_bytes(b"{}")
    assert (folder / "a.json").version() != before
    (folder / "a.json").unlink()
    (folder / "a.json").unlink(missing_ok=True)
    with pytest.raises(FileNotFoundError):
        (folder / "a.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"memory://bucket/run/a\.json"):
        (folder / "a.json").size()
    folder.remove_tree()
    folder.remove_tree()
    assert not files.store
    assert folder.sizes() == {}


@given(st.binary(max_size=200), st.lists(st.tuples(st.integers(0, 220), st.integers(0, 220)), max_size=8))
def test_any_range_of_a_file_is_read(content, ranges):
    path = RemotePath("memory://bucket/file")
    path.write_bytes(content)
    before = remote.FIRST_BYTES, remote.BLOCK_BYTES
    remote.FIRST_BYTES, remote.BLOCK_BYTES = 8, 32
    try:
        with RemoteFile(path) as file:
            for begin, count in ranges:
                file.seek(begin)
                assert file.read(count) == content[begin : begin + count]
    finally:
        remote.FIRST_BYTES, remote.BLOCK_BYTES = before


@given(st.lists(st.binary(max_size=40), max_size=10))
def test_parts_add_up_to_what_was_written(pieces):
    path = RemotePath("memory://bucket/file")
    before, remote.PART_BYTES = remote.PART_BYTES, 16
    try:
        writer = RemoteWriter(path)
        for piece in pieces:
            writer.write(piece)
        writer.finish()
    finally:
        remote.PART_BYTES = before
    assert path.read_bytes() == b"".join(pieces)


def test_a_file_that_becomes_shorter_while_it_is_read_is_an_error():
    path = RemotePath("memory://bucket/file")
    path.write_bytes(b"0123456789")
    with path.open() as file:
        path.write_bytes(b"01")
        with pytest.raises(OSError, match="ends at byte 2: it was replaced in the meantime"):
            file.read(5)


def test_parts_are_uploaded_at_the_same_time_and_one_that_fails_is_repeated(monkeypatch):
    class Store:
        """The calls of s3fs that an upload makes."""

        protocol = ("s3", "s3a")

        def __init__(self):
            self.parts, self.done, self.failures = {}, None, 2
            self.together = threading.Barrier(remote.UPLOADS)

        def split_path(self, path):
            return (*path.split("/", 1), None)

        def call_s3(self, method, **arguments):
            if method == "upload_part":
                if arguments["PartNumber"] == 2 and self.failures:
                    self.failures -= 1
                    raise ConnectionError("reset")
                if arguments["PartNumber"] <= remote.UPLOADS:
                    self.together.wait(60)  # passes only if as many parts are under way
                self.parts[arguments["PartNumber"]] = arguments["Body"]
                return {"ETag": f"{arguments['PartNumber']}"}
            if method == "complete_multipart_upload":
                rows = arguments["MultipartUpload"]["Parts"]
                self.done = b"".join(self.parts[row["PartNumber"]] for row in rows)
            if method == "abort_multipart_upload":
                self.parts.clear()
            return {"UploadId": "7"}

    store = Store()
    monkeypatch.setattr(RemotePath, "file_system", lambda self: (store, "bucket/file"))
    monkeypatch.setattr(remote, "PART_BYTES", 4)
    content = bytes(range(30))
    writer = RemoteWriter(RemotePath("s3://bucket/file"))
    writer.write(content)
    writer.finish()
    assert store.done == content
    assert [len(store.parts[number]) for number in sorted(store.parts)] == [4] * 7 + [2]

    store.failures = 100
    store.together = threading.Barrier(1)
    writer = RemoteWriter(RemotePath("s3://bucket/file"))
    writer.write(content[:20])
    with pytest.raises(OSError, match=r"reset \(after 4 attempts\)") as raised:
        writer.finish()
    assert raised.value.errno == errno.EIO
    writer.abandon()
    assert not store.parts


def test_an_upload_whose_answer_was_lost_is_known_by_its_size_at_present(monkeypatch):
    class Store:
        protocol = "s3"
        size = 1  # of an earlier file of the name, as listed before

        def split_path(self, path):
            return (*path.split("/", 1), None)

        def invalidate_cache(self, path):
            self.size = 6

        def info(self, path):
            return {"size": self.size, "type": "file"}

        def call_s3(self, method, **arguments):
            if method == "complete_multipart_upload":
                raise FileNotFoundError("NoSuchUpload")
            return {"ETag": "1", "UploadId": "7"}

    store = Store()
    monkeypatch.setattr(RemotePath, "file_system", lambda self: (store, "bucket/file"))
    monkeypatch.setattr(remote, "PART_BYTES", 4)
    writer = RemoteWriter(RemotePath("s3://bucket/file"))
    writer.write(bytes(6))
    writer.finish()
    writer = RemoteWriter(RemotePath("s3://bucket/file"))
    writer.write(bytes(7))
    with pytest.raises(FileNotFoundError, match="NoSuchUpload"):
        writer.finish()


def test_only_what_another_attempt_may_change_is_repeated(caplog):
    calls = []

    def request(error):
        calls.append(error)
        raise error

    for error, kind, count in [
        (FileNotFoundError("no such bucket"), FileNotFoundError, 1),
        (PermissionError("denied"), PermissionError, 1),
        (ValueError("bad name"), OSError, 1),
        (RuntimeError("reset"), OSError, remote.ATTEMPTS),
    ]:
        calls.clear()
        with pytest.raises(kind) as raised:
            repeated(lambda error=error: request(error), "reading", "s3://bucket/a")
        assert raised.value.filename == "s3://bucket/a"
        assert str(error) in str(raised.value.strerror)
        assert len(calls) == count
    assert len(caplog.messages) == remote.ATTEMPTS - 1
