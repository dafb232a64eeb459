"""The plans behind checkpoints: names, manifests, rotation."""

from __future__ import annotations

import tempfile

import fsspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accel_state.errors import CheckpointError
from accel_state.files import any_path
from accel_train.checkpoint import layout
from accel_train.checkpoint.files import complaints_about
from accel_train.checkpoint.layout import FileRecord, Manifest

CHARACTERS = st.characters(min_codepoint=33, max_codepoint=0x2FF, exclude_characters="./")
NAMES = st.text(CHARACTERS, min_size=1, max_size=12)
RECORDS = st.builds(
    FileRecord, size=st.integers(0, 2**50), checksum=st.text("0123456789abcdef", min_size=16, max_size=16)
)
MANIFESTS = st.builds(
    Manifest,
    world_size=st.integers(1, 4096),
    step=st.integers(0, 100),
    iteration=st.none() | st.integers(0, 10**6),
    files=st.dictionaries(NAMES, RECORDS, max_size=8),
)


@given(MANIFESTS)
def test_a_manifest_survives_being_written(manifest):
    assert Manifest.from_text(manifest.to_text(), "x") == manifest


FOLDERS = st.dictionaries(NAMES, st.tuples(st.integers(0, 50), st.sampled_from(["same", "longer", "absent"])))


@pytest.mark.parametrize("url", ["", "memory://bucket/run"])
@settings(deadline=None)
@given(files=FOLDERS)
def test_every_absent_or_changed_file_is_named_and_no_other(url, files):
    records = {name: FileRecord(size=size, checksum="") for name, (size, _) in files.items()}
    manifest = Manifest(world_size=1, step=0, files=records)
    with tempfile.TemporaryDirectory() as temporary:
        folder = any_path(url or temporary, "url")
        fsspec.filesystem("memory").store.clear()
        for name, (size, state) in {**files, "another file": (3, "same")}.items():
            if state != "absent":
                (folder / name).write_bytes(bytes(size + (state == "longer")))
        complaints = sorted(complaints_about(folder, manifest))
    assert complaints == sorted(
        f"{name!r} is absent" if state == "absent" else f"{name!r} has {size + 1} bytes, not {size}"
        for name, (size, state) in files.items()
        if state != "same"
    )


@pytest.mark.parametrize("name", ["../x", "/etc/x", "a/../../x", "", "."])
def test_a_manifest_names_no_file_outside_of_its_folder(name):
    manifest = Manifest(world_size=1, step=0, files={name: FileRecord(size=1, checksum="0f")})
    with pytest.raises(CheckpointError, match=r"'here' is damaged .* is outside the folder"):
        Manifest.from_text(manifest.to_text(), "here")


@pytest.mark.parametrize(
    "text",
    [
        "[" * 200000,
        '{"format": 1, "checksum": "xxh3_64", "world_size": Infinity}',
        "",
        "{}",
        "[]",
        '{"format": 1}',
        "\x00",
        '{"format": 1, "checksum": "xxh3_64"}',
    ],
)
def test_a_damaged_manifest_is_named(text):
    with pytest.raises(CheckpointError, match=r"'here/accel_manifest.json' is damaged"):
        Manifest.from_text(text, "here/accel_manifest.json")


def test_a_manifest_of_a_later_version_is_refused():
    text = Manifest(world_size=1, step=0).to_text().replace('"format": 1', '"format": 7')
    with pytest.raises(CheckpointError, match=r"has format 7.*reads format 1"):
        Manifest.from_text(text, "x")


@given(st.integers(0, 99))
def test_every_file_of_a_checkpoint_is_known_as_such(index):
    names = [
        *layout.full_weights_names(index),
        layout.sharded_model_name(index),
        layout.sharded_optimizer_name(index),
        layout.engine_name(index),
        layout.optimizer_name(index),
        layout.scheduler_name(index),
        layout.sampler_name(index),
        layout.loader_state_name(index),
        layout.rng_name(index),
        layout.position_name(index),
        layout.custom_name(index),
        layout.SCALER_NAME,
        layout.MANIFEST_NAME,
    ]
    assert all(layout.is_of_checkpoint(name) for name in names)
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors.index.json", "optimizer.pt", "checkpoint_3"]
)
def test_files_of_others_are_not_taken_for_ours(name):
    assert not layout.is_of_checkpoint(name)


@given(st.integers(0, 10**9))
def test_a_numbered_name_tells_its_number(iteration):
    assert layout.iteration_of(layout.numbered_name(iteration)) == iteration
