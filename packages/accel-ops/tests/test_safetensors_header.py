"""Headers of safetensors files: what the safetensors library refuses is refused, with a sentence."""

from __future__ import annotations

import json
import os

import pytest
import safetensors
import torch

from accel_ops.weights.read import find_checkpoint_files, load_state_dict
from accel_ops.weights.safetensors_io import SafetensorsFile
from accel_state.errors import CheckpointError

DATA = torch.arange(4, dtype=torch.float32).numpy().tobytes()


def row(begin=0, end=16, shape=(4,), dtype="F32", **more):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end], **more}


def file_of(header, data=DATA):
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(raw).to_bytes(8, "little") + raw + data


REFUSED = {
    "overlap": file_of({"a": row(0, 12, (3,)), "b": row(8, 16, (2,))}),
    "shifted": file_of({"a": row(0, 8, (2,)), "b": row(4, 12, (2,))}),
    "hole": file_of({"a": row(0, 4, (1,)), "b": row(8, 16, (2,))}),
    "hole in front": file_of({"a": row(8, 16, (2,))}),
    "trailing data": file_of({"a": row()}, DATA + b"\0"),
    "data without tensors": file_of({}),
    "offsets as texts": file_of({"a": {**row(), "data_offsets": ["0", "16"]}}),
    "offsets as fractions": file_of({"a": {**row(), "data_offsets": [0.0, 16.0]}}),
    "three offsets": file_of({"a": {**row(), "data_offsets": [0, 8, 16]}}),
    "shape of fractions": file_of({"a": {**row(), "shape": [4.0]}}),
    "shape of booleans": file_of({"a": {**row(0, 4), "shape": [True]}}, DATA[:4]),
    "a text as shape": file_of({"a": {**row(), "shape": "4"}}),
    "negative zero": file_of(json.dumps({"a": row()}).replace("[0,", "[-0,").encode()),
    "negative shape": file_of({"a": row(shape=(-2, -2))}),
    "a list as dtype": file_of({"a": {**row(), "dtype": ["F32"]}}),
    "an unknown dtype": file_of({"a": {**row(), "dtype": "F33"}}),
    "no dtype": file_of({"a": {"shape": [4], "data_offsets": [0, 16]}}),
    "a list as metadata": file_of({"__metadata__": ["pt"], "a": row()}),
    "numbers in metadata": file_of({"__metadata__": {"format": 1}, "a": row()}),
    "NaN": file_of(json.dumps({"a": {**row(), "shape": [float("nan")]}}).encode()),
    "UTF-16": file_of(json.dumps({"a": row()}).encode("utf-16-le")),
    "no UTF-8": file_of(b'{"\xff":' + json.dumps(row()).encode() + b"}"),
    "half a surrogate": file_of(b'{"\\ud800":' + json.dumps(row()).encode() + b"}"),
    "deep": file_of(b"[" * 200_000, b""),
    "deep entry": file_of(b'{"a":' * 200_000, b""),
    "a list": file_of(b"[]", b""),
    "nothing": b"",
    "a short length": b"\x01\x02",
    "a long length": b"\xff" * 8 + b"{}",
    "more than there is": file_of({"a": row(0, 32, (8,))}),
    "too many bytes": file_of({"a": row(0, 16, (2**61, 8))}),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_the_library_refuses_is_refused(kind, tmp_path):
    with pytest.raises(safetensors.SafetensorError):
        safetensors.deserialize(REFUSED[kind])
    path = tmp_path / "model.safetensors"
    path.write_bytes(REFUSED[kind])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        SafetensorsFile(path)


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        (b'{"a":%b,"a":%b}' % ((json.dumps(row()).encode(),) * 2), "'a' is there twice"),
        (b" " + json.dumps({"a": row()}).encode(), "no table of tensors"),
        (json.dumps({"a": row(more=[1])}).encode(), "the entry of tensor 'a' is damaged"),
    ],
)
def test_what_the_format_forbids_and_the_library_reads_is_refused(header, reason, tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(file_of(header))
    with pytest.raises(CheckpointError, match=reason):
        SafetensorsFile(path)


@pytest.mark.parametrize(
    "content",
    [
        file_of({}, b""),
        file_of({"__metadata__": None, "a": row()}),
        file_of(
            {
                "b": row(8, 16, (2,)),
                "a": row(0, 8, (2,)),
                "empty": row(8, 8, (0, 3)),
                "one": row(16, 16, (0,)),
            }
        ),
    ],
)
def test_what_the_library_reads_is_read_alike(content, tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    file = SafetensorsFile(path)
    for name, found in safetensors.deserialize(content):
        assert list(file.entries[name].shape) == found["shape"]
        assert file.tensor(name).numpy().tobytes() == bytes(found["data"])
        assert torch.equal(file.tensor(name), file.read(name))


def test_a_shape_that_torch_cannot_count_is_refused(tmp_path):
    path = tmp_path / "model.safetensors"
    for shape in [(0, 2**62, 4), (0, 2**63), (1,) * 65]:
        size = 0 if 0 in shape else 4
        path.write_bytes(file_of({"a": row(0, size, shape)}, DATA[:size]))
        with pytest.raises(CheckpointError, match="the entry of tensor 'a' is damaged"):
            SafetensorsFile(path)


def test_a_file_that_was_replaced_since_its_header_was_read_is_refused(tmp_path):
    path, other = tmp_path / "model.safetensors", tmp_path / "other"
    path.write_bytes(file_of({"a": row()}))
    file = SafetensorsFile(path)
    other.write_bytes(file_of({"aa": row()}))
    other.replace(path)
    for read in (file.tensor, file.read):
        with pytest.raises(CheckpointError, match=r"model\.safetensors' was replaced or resized"):
            read("a")


def test_fifos_and_devices_are_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="is a FIFO"):
        SafetensorsFile(tmp_path / "model.safetensors")
    os.mkfifo(tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="is a FIFO"):
        load_state_dict(tmp_path / "pytorch_model.bin")
    os.mkfifo(tmp_path / "model.safetensors.index.json")
    with pytest.raises(CheckpointError, match="is a FIFO"):
        find_checkpoint_files(tmp_path)
    with pytest.raises(FileNotFoundError, match="'/dev/zero': neither a file nor a folder"):
        find_checkpoint_files("/dev/zero")


def test_a_deep_index_ends_in_a_sentence(tmp_path):
    path = tmp_path / "model.safetensors.index.json"
    path.write_text("[" * 200_000)
    with pytest.raises(CheckpointError, match=r"index\.json' is no index of a checkpoint: it is nested too"):
        find_checkpoint_files(tmp_path)
