"""Files that somebody else has written: odd kinds, endless ones, deep ones."""

from __future__ import annotations

import os
import socket

import pytest

from accel_state.errors import CheckpointError, SettingsError
from accel_state.files import open_regular, parse_json, read_json, read_regular


def test_a_fifo_is_refused_without_waiting(tmp_path):
    path = tmp_path / "model.safetensors"
    os.mkfifo(path)
    with pytest.raises(CheckpointError, match=r"model\.safetensors' is a FIFO, not a file"):
        open_regular(path)


def test_devices_folders_and_sockets_are_refused(tmp_path):
    with pytest.raises(SettingsError, match="'/dev/zero' is a device"):
        read_regular("/dev/zero", error=SettingsError)
    with pytest.raises(CheckpointError, match="is a folder"):
        read_json(tmp_path)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        with pytest.raises(CheckpointError, match="is a socket"):
            read_json(tmp_path / "s")


def test_what_is_absent_is_an_oserror(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_json(tmp_path / "absent.json")


def test_a_file_may_have_as_many_bytes_as_the_bound(tmp_path):
    path = tmp_path / "a.json"
    path.write_text("[1,2]")
    assert read_json(path, limit=5) == [1, 2]
    with pytest.raises(CheckpointError, match="larger than 4 bytes"):
        read_json(path, limit=4)


@pytest.mark.parametrize(
    "text", ["[" * 200_000, '{"a":' * 200_000, "{", b"\xff", b"\xff\xfe[\x00]\x00", "1" * 5000, ""]
)
def test_text_that_is_no_json_ends_in_a_sentence(text):
    with pytest.raises(CheckpointError, match=r"^'f\.json' is not a valid index: "):
        parse_json(text, "f.json", what="index")
