"""Weights on the disk: the folder format, and the mapping that reads them."""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from accel_bigmodel import (
    OffloadedWeightsLoader,
    PrefixedDataset,
    extract_submodules_state_dict,
    load_offloaded_weight,
    load_offloaded_weights,
    offload_state_dict,
    offload_weight,
    save_offload_index,
)
from accel_bigmodel.offloaded_block import StreamedBlocks
from accel_ops.weights.safetensors_io import SafetensorsFile
from accel_state.errors import CheckpointError, CheckpointWriteError, SettingsError

SMAPS = Path("/proc/self/smaps")
TENSORS = {
    "w": torch.randn(3, 4),
    "half": torch.randn(5).bfloat16(),
    "count": torch.tensor(7),
    "none": torch.empty(0, 2),
    "flags": torch.tensor([True, False]),
    "small": torch.randn(4).to(torch.float8_e4m3fn),
}


def bits(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8).tolist() if tensor.numel() else []


def test_every_type_comes_back_bit_for_bit(tmp_path):
    offload_state_dict(tmp_path, TENSORS)
    weights = OffloadedWeightsLoader(save_folder=tmp_path)
    assert list(weights) == list(TENSORS)
    for name, tensor in TENSORS.items():
        assert (weights[name].dtype, weights[name].shape) == (tensor.dtype, tensor.shape)
        assert bits(weights[name]) == bits(tensor)


def test_the_folder_has_the_documented_format(tmp_path):
    offload_state_dict(tmp_path, {"a.w": TENSORS["w"], "b": TENSORS["half"]})
    index = json.loads((tmp_path / "index.json").read_text())
    assert index == {"a.w": {"dtype": "float32", "shape": [3, 4]}, "b": {"dtype": "bfloat16", "shape": [5]}}
    assert (tmp_path / "a.w.dat").read_bytes() == TENSORS["w"].numpy().tobytes()


def test_a_tied_weight_is_one_file(tmp_path):
    weight = torch.randn(3)
    for _ in range(2):  # over itself, too
        offload_state_dict(tmp_path, {"a": weight, "b": weight, "part": weight[:2]})
        assert sorted(path.name for path in tmp_path.iterdir()) == [
            "a.dat",
            "b.dat",
            "index.json",
            "part.dat",
        ]
        assert (tmp_path / "a.dat").samefile(tmp_path / "b.dat")
        weights = OffloadedWeightsLoader(save_folder=tmp_path)
        assert torch.equal(weights["b"], weight)
        assert torch.equal(weights["part"], weight[:2])


def test_asking_whether_a_weight_is_there_reads_nothing(tmp_path):
    weights = OffloadedWeightsLoader(
        index={"a.w": {"safetensors_file": str(tmp_path / "absent.safetensors")}}
    )
    assert "a.w" in weights
    assert "b" not in weights
    assert "w" in PrefixedDataset(weights, "a.")


def test_an_index_grows(tmp_path):
    save_offload_index({}, tmp_path)
    assert not (tmp_path / "index.json").exists()
    save_offload_index({"a": {"dtype": "float32", "shape": [1]}}, tmp_path)
    save_offload_index({"b": {"dtype": "float32", "shape": [1]}}, tmp_path)
    assert list(json.loads((tmp_path / "index.json").read_text())) == ["a", "b"]


def test_an_index_that_cannot_be_written_leaves_the_old_one(tmp_path):
    row = {"dtype": "float32", "shape": [1]}
    save_offload_index({"a": row}, tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(CheckpointWriteError, match=r"index\.json"):
            save_offload_index({f"w{number}": row for number in range(100)}, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert json.loads((tmp_path / "index.json").read_text()) == {"a": row}
    assert len(list(tmp_path.iterdir())) == 1


def test_a_weight_of_another_type_than_its_file_is_refused(tmp_path):
    index = offload_weight(torch.arange(3), "steps", tmp_path)
    index["steps"]["dtype"] = "int32"  # two of its numbers would come of one
    with pytest.raises(CheckpointError, match=r"steps\.dat.*torch.int32 are 12 bytes, the file has 24"):
        load_offloaded_weight(tmp_path / "steps.dat", index["steps"])


def test_a_truncated_weight_is_named(tmp_path):
    entry = offload_weight(TENSORS["w"], "w", tmp_path)["w"]
    (tmp_path / "w.dat").write_bytes(b"1234")
    with pytest.raises(CheckpointError, match=r"w\.dat.* is truncated"):
        load_offloaded_weight(tmp_path / "w.dat", entry)


def test_a_full_disk_is_an_error_and_leaves_nothing(tmp_path):
    full = tmp_path / "full"
    full.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(full)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("no right to mount a file system")
    try:
        # In a process of its own: a write through a mapping would end it with SIGBUS.
        code = (
            "import sys, torch\n"
            "from accel_bigmodel import offload_weight\n"
            "from accel_state.errors import CheckpointWriteError\n"
            "try:\n    offload_weight(torch.ones(1 << 16), 'w', sys.argv[1])\n"
            "except CheckpointWriteError as error:\n    print(error)\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", code, str(full)], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done
        assert "could not write the weight 'w'" in done.stdout
        assert "No space left on device" in done.stdout
        assert list(full.iterdir()) == []
    finally:
        subprocess.run(["umount", str(full)], check=True)


@pytest.mark.parametrize("text", ["[]", "3", "{"])
def test_an_index_that_is_none_ends_in_one_sentence(tmp_path, text):
    (tmp_path / "index.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"index\.json.* is not a valid index of offloaded weights"):
        OffloadedWeightsLoader(save_folder=tmp_path)


@pytest.mark.parametrize("name", ["../evil", "a/b", "..", ""])
def test_a_weight_never_leaves_its_folder(tmp_path, name):
    with pytest.raises(CheckpointError, match="cannot be the name of a file"):
        offload_weight(TENSORS["w"], name, tmp_path)


def test_rewriting_leaves_a_mapped_weight_whole(tmp_path):
    offload_state_dict(tmp_path, {"w": torch.ones(3)})
    mapped = OffloadedWeightsLoader(save_folder=tmp_path)["w"]
    offload_state_dict(tmp_path, {"w": torch.zeros(3)})
    assert torch.equal(mapped, torch.ones(3))


def test_a_module_gets_its_weights_back(tmp_path):
    source, target = nn.Linear(2, 2), nn.Linear(2, 2, device="meta")
    offload_state_dict(tmp_path, source.state_dict())
    index = json.loads((tmp_path / "index.json").read_text())
    load_offloaded_weights(target, {}, tmp_path)
    assert target.weight.is_meta
    load_offloaded_weights(target, index, tmp_path)
    assert torch.equal(target.weight, source.weight)


def test_a_state_dict_comes_before_the_disk_and_casts_are_made(tmp_path):
    save_file({"x": torch.ones(2), "y": torch.full((2,), 1.5)}, tmp_path / "m.safetensors")
    entry = {"safetensors_file": str(tmp_path / "m.safetensors")}
    weights = OffloadedWeightsLoader(
        state_dict={"a": torch.zeros(1)},
        index={
            "a": {**entry, "weight_name": "x"},
            "b": {**entry, "weight_name": "y", "dtype": "float16"},
            "x": entry,
            "lost": {**entry, "weight_name": "gone"},
        },
    )
    assert len(weights) == 4
    assert weights["a"].tolist() == [0]
    assert (weights["b"].dtype, weights["b"].tolist()) == (torch.float16, [1.5, 1.5])
    with pytest.raises(CheckpointError, match="'gone'"):
        weights["lost"]
    with pytest.raises(KeyError):
        weights["unknown"]
    with pytest.raises(SettingsError, match="state_dict, a save_folder or an index"):
        OffloadedWeightsLoader()
    with pytest.raises(SettingsError, match="pass its save_folder"):
        OffloadedWeightsLoader(index={"d": {"dtype": "float32", "shape": [1]}})["d"]


def test_a036_a_file_is_opened_once_however_often_weights_are_asked_for(tmp_path, monkeypatch):
    save_file({f"t{i}": torch.full((2,), float(i)) for i in range(5)}, tmp_path / "m.safetensors")
    opened = []
    original = SafetensorsFile.__init__
    monkeypatch.setattr(
        SafetensorsFile, "__init__", lambda self, path: (opened.append(path), original(self, path))[1]
    )
    index = {f"t{i}": {"safetensors_file": str(tmp_path / "m.safetensors")} for i in range(5)}
    weights = OffloadedWeightsLoader(index=index)
    for _ in range(3):
        for i in range(5):
            assert weights[f"t{i}"].tolist() == [i, i]
    assert len(opened) == 1
    assert weights["t1"] is weights["t1"]


def test_a_prefix_is_added_and_only_its_keys_are_seen():
    view = PrefixedDataset({"a.w": 1, "a.b": 2, "ab.w": 3}, "a.")
    assert (dict(view), len(view), view["w"]) == ({"w": 1, "b": 2}, 2, 1)


def test_a_part_of_a_state_dict_is_taken_by_module():
    tensors = {"a.w": 1, "ab.w": 2, "gain": 3, "a": 4}
    assert extract_submodules_state_dict(tensors, ["a", "gain"]) == {"a.w": 1, "gain": 3, "a": 4}
    assert extract_submodules_state_dict(tensors, [""]) == tensors


def test_an_error_of_reading_ahead_is_raised_where_the_block_is_used(tmp_path):
    path = tmp_path / "m.safetensors"
    save_file({"a": torch.ones(8).half(), "b": torch.ones(1 << 16).half()}, path)
    index = {name: {"safetensors_file": str(path), "dtype": "float32"} for name in ("a", "b")}
    loader = OffloadedWeightsLoader(index=index)
    weights = StreamedBlocks(loader, {"a": ["a"], "b": ["b"]}, torch.device("cpu"))
    path.write_bytes(path.read_bytes()[:1000])
    weights.acquire("a")
    weights.prefetch("b")
    with pytest.raises(CheckpointError, match="ends at byte"):
        weights.acquire("b")
    weights.release("a")
