"""Checkpoint files are found and read; what could harm the reader is refused."""

from __future__ import annotations

import json
import zipfile

import pytest
import torch
from safetensors.torch import save_file

from accel_ops.weights.layout import (
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_NAME,
)
from accel_ops.weights.read import device_of, find_checkpoint_files, load_state_dict
from accel_state.errors import CheckpointError


@pytest.mark.parametrize(
    "shard",
    ["/etc/passwd", "../other.safetensors", "a/../../b.safetensors", "C:\\x.safetensors", "\\\\h\\s", ""],
)
def test_an_index_that_leaves_its_folder_is_refused(tmp_path, shard):
    (tmp_path / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps({"weight_map": {"w": shard}}))
    with pytest.raises(CheckpointError, match="refused as unsafe"):
        find_checkpoint_files(tmp_path)


def test_an_older_index_is_the_table_alone(tmp_path):
    (tmp_path / "x.index.json").write_text(json.dumps({"w": "one.bin", "v": "two.bin"}))
    for name in ("one.bin", "two.bin"):
        (tmp_path / name).touch()
    found = find_checkpoint_files(tmp_path)
    assert {name: path.name for name, path in found.weight_map.items()} == {"w": "one.bin", "v": "two.bin"}


def test_a_file_without_any_table_is_no_index(tmp_path):
    (tmp_path / "x.index.json").write_text(json.dumps({"metadata": {"total_size": 8}}))
    with pytest.raises(CheckpointError, match="no 'weight_map' table"):
        find_checkpoint_files(tmp_path)


def test_an_index_names_the_shards_that_are_absent(tmp_path):
    (tmp_path / "x.index.json").write_text(json.dumps({"weight_map": {"w": "one.bin", "v": "two.bin"}}))
    (tmp_path / "one.bin").touch()
    with pytest.raises(CheckpointError, match=r"absent files: two\.bin"):
        find_checkpoint_files(tmp_path)


def test_a_folder_is_read_by_what_it_holds(tmp_path):
    with pytest.raises(CheckpointError, match="found none"):
        find_checkpoint_files(tmp_path)
    with pytest.raises(FileNotFoundError, match="neither a file nor a folder"):
        find_checkpoint_files(tmp_path / "nowhere")
    (tmp_path / "custom.safetensors").touch()
    assert find_checkpoint_files(tmp_path).files == (tmp_path / "custom.safetensors",)
    (tmp_path / WEIGHTS_NAME).touch()
    assert find_checkpoint_files(tmp_path).files == (tmp_path / WEIGHTS_NAME,)
    (tmp_path / SAFE_WEIGHTS_NAME).touch()
    assert find_checkpoint_files(tmp_path).files == (tmp_path / SAFE_WEIGHTS_NAME,)


class Bomb:
    def __reduce__(self):
        return (print, ("boom",))


def test_a_bin_file_that_would_run_code_is_refused(tmp_path, capsys):
    torch.save({"w": Bomb()}, tmp_path / "evil.bin")
    with pytest.raises(CheckpointError, match=r"evil\.bin.*run code"):
        load_state_dict(tmp_path / "evil.bin")
    (tmp_path / "junk.bin").write_bytes(b"junk")
    with pytest.raises(CheckpointError, match=r"junk\.bin"):
        load_state_dict(tmp_path / "junk.bin")
    torch.save([1], tmp_path / "list.bin")
    with pytest.raises(CheckpointError, match="'list', not a state dict"):
        load_state_dict(tmp_path / "list.bin")
    assert capsys.readouterr().out == ""


def test_a_bin_file_of_the_old_format_is_read(tmp_path):
    torch.save({"w": torch.ones(3)}, tmp_path / "old.bin", _use_new_zipfile_serialization=False)
    assert torch.equal(load_state_dict(tmp_path / "old.bin")["w"], torch.ones(3))


def test_a_device_map_moves_only_what_it_sends_to_an_accelerator(tmp_path):
    save_file({"a.w": torch.ones(2), "b.w": torch.ones(2), "c": torch.ones(2)}, tmp_path / "m.safetensors")
    found = load_state_dict(tmp_path / "m.safetensors", device_map={"a": "meta", "b": "disk"})
    assert {name: tensor.device.type for name, tensor in found.items()} == {
        "a.w": "meta",
        "b.w": "cpu",
        "c": "cpu",
    }


def test_the_longest_entry_of_a_map_decides():
    table = {"": 3, "a": 0, "a.b": "cpu"}
    assert [device_of(name, table) for name in ("a.b.c", "a.bc", "ab", "a")] == ["cpu", 0, 3, 0]
    assert device_of("x", {"a": 0}) is None


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


def test_a_bin_file_may_be_overwritten_once_it_is_read(path):
    found = load_state_dict(path)
    path.write_bytes(bytes(path.stat().st_size))
    assert torch.equal(found["a"], STATE["a"])


def test_an_archive_that_was_packed_anew_is_read(path):
    rewrite(path, lambda name, content: [(name, content)])
    assert torch.equal(load_state_dict(path)["a"], STATE["a"])


def test_the_format_from_before_torch_1_6_is_read(tmp_path):
    torch.save({"a": STATE["a"]}, tmp_path / "old.bin", _use_new_zipfile_serialization=False)
    assert torch.equal(load_state_dict(tmp_path / "old.bin")["a"], STATE["a"])


def test_a_file_that_was_cut_is_refused(path):
    content = path.read_bytes()
    for length in (0, 3, 100, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:length])
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
