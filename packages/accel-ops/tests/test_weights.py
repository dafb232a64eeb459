"""Weight files: names, sizes, shards, aliases, reading and writing."""

from __future__ import annotations

import itertools
import json
import logging
import os
import struct
import subprocess
import sys
import tempfile
import weakref
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn

from accel_ops.weights.layout import (
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    SAFE_WEIGHTS_PATTERN_NAME,
    WEIGHTS_NAME,
    convert_bytes,
    convert_file_size_to_int,
    dtype_byte_size,
    fill_shards,
    groups_of,
    numbered,
)
from accel_ops.weights.read import device_of, find_checkpoint_files, load, load_state_dict
from accel_ops.weights.safetensors_io import SafetensorsFile, clean_state_dict_for_safetensors
from accel_ops.weights.tensors import (
    check_tied_parameters_in_config,
    find_tied_parameters,
    get_non_persistent_buffers,
    named_module_tensors,
    retie_parameters,
)
from accel_ops.weights.write import save, save_state_dict, save_state_parts
from accel_state.errors import CheckpointError, SettingsError
from accel_state.labels import CustomDtype


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1GB", 10**9),
        (2.75, 2),
        ("8Gb", 10**9),
        ("2 GiB", 2**31),
        ("0.5MB", 500_000),
        ("12", 12),
        ("7B", 7),
        ("3kib", 3072),
        (5, 5),
    ],
)
def test_a_size_is_read_with_its_unit(text, size):
    assert convert_file_size_to_int(text) == size


@pytest.mark.parametrize("size", [float("inf"), float("nan")])
def test_a_number_that_is_no_size_is_refused(size):
    with pytest.raises(SettingsError, match="is not a size"):
        convert_file_size_to_int(size)


@pytest.mark.parametrize("text", ["", "GB", "5 apples", "-1GB", "1.2.3GB", "5i", "1e3"])
def test_a_text_that_is_no_size_is_named(text):
    with pytest.raises(SettingsError, match="is not a size"):
        convert_file_size_to_int(text)


def test_sizes_print_in_binary_steps():
    sizes = (0, 1023, 1024, 1536 * 1024, 5 * 2**30, 3 * 2**50)
    assert [convert_bytes(size) for size in sizes] == [
        "0 bytes",
        "1023 bytes",
        "1.0 KB",
        "1.5 MB",
        "5.0 GB",
        "3.0 PB",
    ]


def test_an_element_takes_what_torch_says():
    for dtype in (torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.complex64):
        assert dtype_byte_size(dtype) == torch.empty(1, dtype=dtype).element_size()
    assert [dtype_byte_size(d) for d in (CustomDtype.FP8, CustomDtype.INT4, CustomDtype.INT2)] == [
        1,
        0.5,
        0.25,
    ]


def planned(tensors, limit):
    shards = [*fill_shards(groups_of(tensors), limit)]
    names = [[name for group in groups for name in group] for groups, _ in shards]
    return numbered(names, total_size=sum(size for _, size in shards), pattern=SAFE_WEIGHTS_PATTERN_NAME)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=30), st.integers(4, 400))
def test_shards_keep_order_fill_up_and_hold_everything_once(lengths, limit):
    tensors = {f"t{i}": torch.empty(n) for i, n in enumerate(lengths)}
    plan = planned(tensors, limit)
    assert [name for names in plan.files.values() for name in names] == list(tensors)
    sizes = [[4 * len(tensors[name]) for name in names] for names in plan.files.values()]
    assert all(sum(shard) <= limit or len(shard) == 1 for shard in sizes)
    # Nothing that begins a shard would have fitted in the shard before.
    assert all(sum(a) + b[0] > limit for a, b in itertools.pairwise(sizes))
    assert plan.total_size == 4 * sum(lengths)
    assert (plan.index is None) == (len(plan.files) == 1)


def test_tensors_of_one_storage_stay_in_one_shard_and_count_once():
    base = torch.zeros(10)
    tensors = {"a": base, "b": torch.zeros(10), "c": base, "d": base[:5]}
    plan = planned(tensors, 40)
    assert plan.files == {
        "model-00001-of-00002.safetensors": ("a", "c", "d"),
        "model-00002-of-00002.safetensors": ("b",),
    }
    assert plan.total_size == 80


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.body = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight


def test_tied_parameters_are_found_on_the_meta_device_too():
    for model in (Tied(), Tied().to("meta")):
        retie_parameters(model, [])
        model.head.weight = model.embed.weight
        assert find_tied_parameters(model) == [["embed.weight", "head.weight"]]
    assert find_tied_parameters(nn.Linear(2, 2)) == []


@pytest.mark.parametrize("loaded", ["embed", "head"])
def test_retying_takes_the_name_that_has_values(loaded):
    model = Tied().to("meta")
    values = torch.ones(5, 3)
    getattr(model, loaded).weight = nn.Parameter(values)
    retie_parameters(model, [["embed.weight", "head.weight"]])
    assert model.embed.weight is model.head.weight
    assert torch.equal(model.embed.weight, values)


def test_a_configuration_tells_whether_weights_should_be_tied():
    class Config:
        tie_word_embeddings = True

    model = Tied()
    model.config = Config()
    assert not check_tied_parameters_in_config(model)
    model.get_output_embeddings = lambda: model.head
    assert check_tied_parameters_in_config(model)
    Config.tie_word_embeddings = False
    assert not check_tied_parameters_in_config(model)


def test_module_tensors_come_by_name_parameters_first():
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2))
    model[0].register_buffer("cache", torch.zeros(1), persistent=False)
    names = [name for name, _ in named_module_tensors(model, recurse=True, remove_non_persistent=True)]
    assert names == [*list(model.state_dict())[:2], "1.weight", "1.bias", *list(model.state_dict())[2:5]]
    assert "0.cache" in dict(named_module_tensors(model, recurse=True))
    assert get_non_persistent_buffers(model, recurse=True, fqns=True) == {"0.cache"}
    assert get_non_persistent_buffers(model, recurse=True) == {"cache"}
    assert get_non_persistent_buffers(model) == set()
    assert dict(named_module_tensors(model)) == {}


def test_cleaning_keeps_parts_of_a_storage_and_drops_second_names(caplog):
    base = torch.arange(6.0)
    weight = torch.ones(2, 3)
    given_dict = {"first": base[:3], "second": base[3:], "w": weight, "tied": weight, "t": weight.t(), "n": 3}
    with caplog.at_level(logging.WARNING):
        cleaned = clean_state_dict_for_safetensors(given_dict)
    assert list(cleaned) == ["first", "second", "w", "t", "n"]
    assert "tied (kept as w)" in caplog.text
    pointers = [t.untyped_storage().data_ptr() for t in cleaned.values() if isinstance(t, torch.Tensor)]
    assert len(set(pointers)) == len(pointers)
    for name in ("first", "second", "w", "t"):
        assert torch.equal(cleaned[name], given_dict[name])
        assert cleaned[name].is_contiguous()


ALL_TYPES = {
    "f32": torch.randn(3, 4),
    "bf16": torch.randn(5).bfloat16(),
    "f8": torch.randn(7).to(torch.float8_e4m3fn),
    "i64": torch.arange(3),
    "bool": torch.tensor([True, False, True]),
    "scalar": torch.tensor(2.5),
    "empty": torch.empty(0, 4),
    "u8": torch.arange(5, dtype=torch.uint8),
}


def same(left, right):
    return left.shape == right.shape and torch.equal(
        left.contiguous().view(-1).view(torch.uint8) if left.numel() else left,
        right.contiguous().view(-1).view(torch.uint8) if right.numel() else right,
    )


def test_mapped_tensors_equal_what_safetensors_reads(tmp_path):
    save_file(ALL_TYPES, tmp_path / "m.safetensors", metadata={"who": "me"})
    file = SafetensorsFile(tmp_path / "m.safetensors")
    assert file.metadata == {"who": "me"}
    expected = load_file(tmp_path / "m.safetensors")
    assert set(file.entries) == set(expected)
    for name, value in expected.items():
        found = file.tensor(name)
        assert found.dtype == value.dtype
        assert same(found, value)
    file.read_ahead(file.entries)
    file.evict(file.entries)
    assert same(file.tensor("f32"), ALL_TYPES["f32"])


def test_writing_to_a_mapped_tensor_never_changes_the_file(tmp_path):
    save_file({"w": torch.ones(4)}, tmp_path / "m.safetensors")
    mapped = SafetensorsFile(tmp_path / "m.safetensors").tensor("w")
    mapped.fill_(7)
    assert torch.equal(load_file(tmp_path / "m.safetensors")["w"], torch.ones(4))


def test_replacing_a_file_leaves_its_mapped_tensors_whole(tmp_path):
    save_state_dict({"w": torch.ones(4)}, tmp_path)
    mapped = load_state_dict(tmp_path / SAFE_WEIGHTS_NAME)["w"]
    save_state_dict({"w": torch.zeros(4)}, tmp_path)
    assert torch.equal(mapped, torch.ones(4))
    assert torch.equal(load_state_dict(tmp_path / SAFE_WEIGHTS_NAME)["w"], torch.zeros(4))


def test_a_truncated_file_names_the_tensor_that_it_breaks(tmp_path):
    path = tmp_path / "m.safetensors"
    save_file({"early": torch.ones(4), "late": torch.ones(400)}, path)
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(CheckpointError, match=r"truncated: tensor 'late'"):
        SafetensorsFile(path)


def corrupt(path: Path, **changes: object) -> None:
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    header["w"].update(changes)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shape": [3]}, "needs 12 bytes, its entry spans 16"),
        ({"dtype": "F7"}, "'F7', unknown"),
        ({"data_offsets": [-8, 8]}, "entry of tensor 'w' is damaged"),
        ({"data_offsets": [16, 0]}, "entry of tensor 'w' is damaged"),
        ({"data_offsets": "ab"}, "entry of tensor 'w' is damaged"),
        ({"shape": [-4]}, "entry of tensor 'w' is damaged"),
        ({"data_offsets": [8, 24]}, "truncated: tensor 'w'"),
    ],
)
def test_a_damaged_entry_names_its_tensor(tmp_path, changes, message):
    path = tmp_path / "m.safetensors"
    save_file({"w": torch.ones(4)}, path)
    corrupt(path, **changes)
    with pytest.raises(CheckpointError, match=message):
        SafetensorsFile(path)


@pytest.mark.parametrize(
    "raw", [b"", b"1234", struct.pack("<Q", 2**60) + b"{}", struct.pack("<Q", 4) + b"{{{{"]
)
def test_a_file_without_a_header_is_refused(tmp_path, raw):
    path = tmp_path / "m.safetensors"
    path.write_bytes(raw)
    with pytest.raises(CheckpointError, match=r"m\.safetensors"):
        SafetensorsFile(path)


@pytest.mark.parametrize("safe", [True, False])
def test_a_state_dict_comes_back_from_shards(tmp_path, safe):
    tensors = {f"layer{i}.weight": torch.randn(8) for i in range(5)}
    plan = save_state_dict(tensors, tmp_path, max_shard_size=64, safe_serialization=safe)
    found = find_checkpoint_files(tmp_path)
    assert [path.name for path in found.files] == list(plan.files)
    loaded = {name: value for path in found.files for name, value in load_state_dict(path).items()}
    assert loaded.keys() == tensors.keys()
    assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)
    assert {name: path.name for name, path in found.weight_map.items()} == plan.weight_map


@pytest.mark.parametrize("safe", [True, False])
def test_a_state_dict_in_parts_is_written_as_it_is_whole(tmp_path, safe):
    tensors = {f"layer{i}.weight": torch.randn(8) for i in range(5)}
    tensors["tied.weight"] = tensors["layer2.weight"]
    names = [[*tensors][:2], ["layer2.weight", "tied.weight"], ["layer3.weight"], ["layer4.weight"]]
    parts = ({name: tensors[name] for name in own} for own in names)
    options = {"max_shard_size": 64, "safe_serialization": safe}
    whole = save_state_dict(tensors, tmp_path / "whole", **options)
    assert save_state_parts(parts, tmp_path / "parts", **options) == whole
    files = sorted(path.name for path in (tmp_path / "whole").iterdir())
    assert sorted(path.name for path in (tmp_path / "parts").iterdir()) == files
    assert len(files) == 4, "three shards and their index"
    for name in files:
        here, there = (tmp_path / folder / name for folder in ("whole", "parts"))
        if name.endswith(".bin"):  # torch writes the name of the file into it
            assert str(torch.load(here)) == str(torch.load(there))
        else:
            assert here.read_bytes() == there.read_bytes()


@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=12),
    st.integers(16, 200),
)
@settings(max_examples=25, deadline=None)
def test_no_more_is_held_than_a_file_and_a_part(sizes, limit):
    alive, most = [], []

    def parts():
        for number, size in enumerate(sizes):
            made = torch.zeros(size)
            alive.append((weakref.ref(made), 4 * size))
            most.append(sum(nbytes for one, nbytes in alive if one() is not None))
            yield {f"t{number}": made}
            del made

    with tempfile.TemporaryDirectory() as folder:
        save_state_parts(parts(), folder, max_shard_size=limit)
    assert max(most) <= max(limit, 4 * max(sizes)) + 4 * max(sizes)


def test_parts_that_break_off_leave_the_earlier_files(tmp_path):
    save_state_dict({"a": torch.zeros(8), "b": torch.zeros(8)}, tmp_path, max_shard_size=32)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def parts():
        yield {"a": torch.ones(8)}
        yield {"b": torch.ones(8)}
        raise OSError("no more")

    with pytest.raises(OSError, match="no more"):
        save_state_parts(parts(), tmp_path, max_shard_size=32)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_second_save_leaves_no_shard_of_the_first(tmp_path):
    tensors = {f"t{i}": torch.randn(8) for i in range(5)}
    save_state_dict(tensors, tmp_path, max_shard_size=32)
    save_state_dict(tensors, tmp_path, max_shard_size=64)
    assert sorted(p.name for p in tmp_path.glob("*.safetensors")) == [
        f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)
    ]
    save_state_dict(tensors, tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == [SAFE_WEIGHTS_NAME]


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


@pytest.mark.parametrize("safe", [True, False])
def test_save_and_load_are_inverse(tmp_path, safe):
    tensors = {"a": torch.randn(3), "b": torch.arange(4)}
    save(tensors, tmp_path / "f", safe_serialization=safe)
    back = load_file(tmp_path / "f") if safe else load(tmp_path / "f")
    assert all(torch.equal(back[name], tensors[name]) for name in tensors)
    assert [path.name for path in tmp_path.iterdir()] == ["f"]


def test_saved_files_have_the_mode_that_the_umask_gives(tmp_path):
    (tmp_path / "plain").touch()
    save({"a": torch.zeros(1)}, tmp_path / "f", safe_serialization=True)
    assert (tmp_path / "f").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_safetensors_do_not_go_into_an_open_file(tmp_path):
    with (tmp_path / "f").open("wb") as file, pytest.raises(TypeError, match="pass the path"):
        save({}, file, safe_serialization=True)


FOREIGN = """
import os, sys
from pathlib import Path
from accel_ops.weights.safetensors_io import SafetensorsFile
os.setgid(65534), os.setuid(65534)
file = SafetensorsFile(sys.argv[1])
file.read_ahead(file.entries)
smaps, _, rest = Path("/proc/self/smaps").read_text().partition(sys.argv[1])
print(next(line for line in rest.splitlines() if line.startswith("Rss:")).split()[1])
"""


@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="needs root of a Linux machine")
def test_weights_of_another_user_are_read_ahead():
    # Not in tmp_path, whose parents only root may enter.
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        path = Path(folder) / "m.safetensors"
        save_file({"w": torch.ones(1 << 20)}, path)
        path.chmod(0o644)
        done = subprocess.run(
            [sys.executable, "-c", FOREIGN, str(path)], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        assert int(done.stdout) >= 4096  # KiB, all of it
