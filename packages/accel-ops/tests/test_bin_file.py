"""Weight files of torch.save: read as torch reads them, or refused."""

from __future__ import annotations

import zipfile

import pytest
import torch

from accel_ops.weights.read import load_state_dict
from accel_state.errors import CheckpointError

STATE = {
    "a": torch.arange(4096, dtype=torch.float32).view(64, 64),
    "b": torch.ones(3, dtype=torch.bfloat16),
    "i": torch.arange(5),
    "u": torch.ones(3, dtype=torch.uint16),
    "f8": torch.ones(3).to(torch.float8_e4m3fn),
    "c": torch.ones(2, dtype=torch.complex64),
    "e": torch.empty(0),
    "p": torch.nn.Parameter(torch.ones(2)),
}
STATE |= {"turned": STATE["a"].t(), "tied": STATE["a"], "part": STATE["a"][3:5]}


@pytest.fixture
def path(tmp_path):
    torch.save(STATE, tmp_path / "pytorch_model.bin")
    return tmp_path / "pytorch_model.bin"


def rewrite(path, change, **how):
    """Write the archive anew, its records changed."""
    with zipfile.ZipFile(path) as archive:
        records = [(row.filename, archive.read(row)) for row in archive.infolist()]
    with zipfile.ZipFile(path, "w", **how) as archive:
        for name, content in records:
            for new_name, new_content in change(name, content):
                archive.writestr(new_name, new_content)


def test_every_type_view_and_tie_is_read(path):
    found = load_state_dict(path)
    assert found.keys() == STATE.keys()
    for name, tensor in STATE.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].equal(tensor) or torch.equal(found[name].float(), tensor.float())
    assert found["tied"].data_ptr() == found["a"].data_ptr()


def test_an_archive_that_was_packed_anew_is_read(path):
    rewrite(path, lambda name, content: [(name, content)])
    assert torch.equal(load_state_dict(path)["a"], STATE["a"])


def test_the_format_from_before_torch_1_6_is_read(tmp_path):
    torch.save({"a": STATE["a"]}, tmp_path / "old.bin", _use_new_zipfile_serialization=False)
    assert torch.equal(load_state_dict(tmp_path / "old.bin")["a"], STATE["a"])


@pytest.mark.parametrize("length", [0, 100, 4096 * 4 - 1, 4096 * 4 + 64])
def test_a_record_of_another_length_than_its_tensor_is_refused(path, length):
    rewrite(
        path,
        lambda name, content: [
            (name, (content + bytes(64))[:length] if name.endswith("data/0") else content)
        ],
    )
    with pytest.raises(
        CheckpointError, match=rf"bin' .*record '0' has {length} bytes, its tensors need 16384"
    ):
        load_state_dict(path)


def test_compressed_doubled_and_absent_records_are_refused(path):
    original = path.read_bytes()
    rewrite(path, lambda name, content: [(name, content)], compression=zipfile.ZIP_DEFLATED)
    with pytest.raises(CheckpointError, match="is compressed"):
        load_state_dict(path)
    path.write_bytes(original)
    with pytest.warns(UserWarning, match="Duplicate name"):
        rewrite(path, lambda name, content: [(name, content)] * (1 + name.endswith("data/1")))
    with pytest.raises(CheckpointError, match=r"no archive of torch\.save"):
        load_state_dict(path)
    path.write_bytes(original)
    rewrite(path, lambda name, content: [] if name.endswith("data/1") else [(name, content)])
    with pytest.raises(CheckpointError, match="record '1' has 0 bytes"):
        load_state_dict(path)
    path.write_bytes(b"#!/bin/sh\n" + original)
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin"):
        load_state_dict(path)


def test_a_meta_model_is_refused(tmp_path):
    torch.save({"a": torch.empty(4, device="meta")}, tmp_path / "a.bin")
    with torch.device("meta"):
        torch.save(torch.nn.Linear(2, 2).state_dict(), tmp_path / "b.bin")
    for name in ("a.bin", "b.bin"):
        try:
            found = load_state_dict(tmp_path / name)
        except CheckpointError:
            continue
        assert all(tensor.is_meta for tensor in found.values())


def test_a_tensor_that_is_larger_than_its_record_is_refused(path):
    def grow(name, content):
        # 64 x 64, as the pickle has it, to 64 x 127
        return [(name, content.replace(b"K@K@\x86", b"K@K\x7f\x86") if name.endswith(".pkl") else content)]

    rewrite(path, grow)
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin"):
        load_state_dict(path)
