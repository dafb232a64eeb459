"""Weight files are written completely or not at all."""

from __future__ import annotations

import tempfile
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from accel_ops.weights.layout import SAFE_WEIGHTS_NAME, WEIGHTS_NAME
from accel_ops.weights.read import find_checkpoint_files, load, load_state_dict
from accel_ops.weights.write import save, save_state_dict
from accel_state.errors import CheckpointError


def test_replacing_a_file_leaves_its_mapped_tensors_whole(tmp_path):
    save_state_dict({"w": torch.ones(4)}, tmp_path)
    mapped = load_state_dict(tmp_path / SAFE_WEIGHTS_NAME)["w"]
    save_state_dict({"w": torch.zeros(4)}, tmp_path)
    assert torch.equal(mapped, torch.ones(4))
    assert torch.equal(load_state_dict(tmp_path / SAFE_WEIGHTS_NAME)["w"], torch.zeros(4))


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
    assert save_state_dict(parts, tmp_path / "parts", **options) == whole
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
        save_state_dict(parts(), folder, max_shard_size=limit)
    assert max(most) <= max(limit, 4 * max(sizes)) + 4 * max(sizes)


def test_parts_that_break_off_leave_the_earlier_files(tmp_path):
    save_state_dict({"a": torch.zeros(8), "b": torch.zeros(8)}, tmp_path, max_shard_size=32)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def parts():
        yield {"a": torch.ones(8)}
        yield {"b": torch.ones(8)}
        raise OSError("no more")

    with pytest.raises(OSError, match="no more"):
        save_state_dict(parts(), tmp_path, max_shard_size=32)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_an_object_that_holds_itself_is_saved(tmp_path):
    cycle = {"step": 3}
    cycle["self"] = cycle
    save(cycle, tmp_path / "cycle.bin")
    found = torch.load(tmp_path / "cycle.bin")
    assert found["self"] is found
    assert found["step"] == 3


def test_a_second_save_leaves_no_shard_of_the_first(tmp_path):
    tensors = {f"t{i}": torch.randn(8) for i in range(5)}
    save_state_dict(tensors, tmp_path, max_shard_size=32)
    save_state_dict(tensors, tmp_path, max_shard_size=64)
    assert sorted(p.name for p in tmp_path.glob("*.safetensors")) == [
        f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)
    ]
    save_state_dict(tensors, tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == [SAFE_WEIGHTS_NAME]


@pytest.mark.parametrize("sizes", [("1KB", "1KB"), ("1KB", 32), (32, "1KB"), (32, 32)])
@pytest.mark.parametrize("safe", [True, False])
def test_a_folder_holds_what_was_saved_last_in_whatever_format(tmp_path, sizes, safe):
    for value, size, is_safe in zip((1, 2), sizes, (not safe, safe), strict=True):
        state = {f"t{i}": torch.full((8,), value) for i in range(3)}
        save_state_dict(state, tmp_path, max_shard_size=size, safe_serialization=is_safe)
    found: dict[str, torch.Tensor] = {}
    for file in find_checkpoint_files(tmp_path).files:
        found.update(load_state_dict(file))
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], state[name]) for name in state)


def test_a_save_keeps_weights_of_another_format_that_are_not_read_in_its_place(tmp_path):
    save_state_dict({"a": torch.zeros(8)}, tmp_path, safe_serialization=False)
    save_state_dict({"a": torch.ones(8)}, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [SAFE_WEIGHTS_NAME, WEIGHTS_NAME]


def test_a_save_keeps_files_that_are_no_shards(tmp_path):
    kept = ["model-best-of-three.safetensors", "model-1-of-2.safetensors"]
    for name in kept:
        (tmp_path / name).write_bytes(b"mine")
    save_state_dict({"a": torch.ones(1)}, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*kept, SAFE_WEIGHTS_NAME])


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


@pytest.mark.filterwarnings("ignore:Validating sparse", "ignore:Sparse CSR")  # of torch
def test_what_is_no_dense_tensor_is_pickled_or_refused_by_its_name(tmp_path):
    state = {"a": torch.ones(2), "a._extra_state": {"scale": 3}, "adjacency": torch.eye(2).to_sparse()}
    save_state_dict(state, tmp_path, safe_serialization=False)
    loaded = torch.load(tmp_path / WEIGHTS_NAME, weights_only=True)
    assert loaded["a._extra_state"] == {"scale": 3}
    assert torch.equal(loaded["adjacency"].to_dense(), torch.eye(2))
    for value, kind in (
        ({"scale": 3}, "a dict"),
        (torch.eye(2).to_sparse(), "sparse_coo"),
        (torch.eye(2).to_sparse_csr(), "sparse_csr"),
    ):
        with pytest.raises(CheckpointError, match=f"'odd' is .*{kind}"):
            save_state_dict({"odd": value}, tmp_path)


def test_a_tensor_with_the_name_of_the_metadata_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="'__metadata__'"):
        save_state_dict({"__metadata__": torch.ones(2)}, tmp_path)


def test_safetensors_do_not_go_into_an_open_file(tmp_path):
    with (tmp_path / "f").open("wb") as file, pytest.raises(TypeError, match="pass the path"):
        save({}, file, safe_serialization=True)
