"""Files on object stores: paths, reading by ranges, uploads."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import fsspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel_state import remote
from accel_state.errors import SettingsError
from accel_state.files import any_path, local_path, read_json
from accel_state.remote import RemoteFile, RemotePath


@pytest.fixture(autouse=True)
def files():
    files = fsspec.filesystem("memory")
    files.store.clear()
    yield files
    files.store.clear()


def test_a_path_is_local_or_a_url():
    assert any_path("runs/7", "x") == Path("runs/7")
    assert any_path("file:///tmp/a", "x") == Path("/tmp/a")
    assert any_path("file:///C:/runs", "x") == Path("C:/runs")
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
    with (folder / "inner" / "b.bin").open("rb") as file:
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
    before = remote.SMALL_BYTES, remote.BLOCK_BYTES
    remote.SMALL_BYTES, remote.BLOCK_BYTES = 8, 32
    try:
        with RemoteFile(path) as file:
            for begin, count in ranges:
                file.seek(begin)
                assert file.read(count) == content[begin : begin + count]
    finally:
        remote.SMALL_BYTES, remote.BLOCK_BYTES = before


def test_a_file_exists_once_its_block_has_ended(files):
    path = RemotePath("memory://bucket/file")
    with path.create() as file:
        file.write(b"0123")
        assert not path.exists()
    assert path.read_bytes() == b"0123"
    with pytest.raises(ZeroDivisionError), path.create() as file:
        file.write(bytes(1 // 0))
    assert path.read_bytes() == b"0123"
    path.unlink()
    assert not files.store


def test_a_file_that_becomes_shorter_while_it_is_read_is_an_error(monkeypatch):
    monkeypatch.setattr(remote, "SMALL_BYTES", 1)
    path = RemotePath("memory://bucket/file")
    path.write_bytes(b"0123456789")
    with path.open() as file:
        path.write_bytes(b"01")
        with pytest.raises(OSError, match="ends at byte 2: it was replaced"):
            file.read(5)


def test_an_error_of_any_class_names_the_file(monkeypatch):
    path = RemotePath("memory://bucket/a")
    for error, kind in [
        (FileNotFoundError("no such bucket"), FileNotFoundError),
        (PermissionError("denied"), PermissionError),
        (RuntimeError("reset"), OSError),
    ]:
        store = mock.Mock(spec=["invalidate_cache", "cat_file"], **{"cat_file.side_effect": error})
        monkeypatch.setattr(RemotePath, "file_system", lambda self, store=store: (store, "bucket/a"))
        with pytest.raises(kind, match=str(error)) as raised:
            path.read_bytes()
        assert raised.value.filename == "memory://bucket/a"
