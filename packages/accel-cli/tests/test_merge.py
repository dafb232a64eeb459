from __future__ import annotations

import warnings

import fsspec
import pytest
import torch
from safetensors.torch import load, load_file
from torch.distributed.checkpoint import save

from accel_cli.main import main

WEIGHTS = {"layer.weight": torch.arange(12.0).reshape(3, 4), "layer.bias": torch.ones(3)}


@pytest.fixture
def shards(tmp_path):
    """A model as torch.distributed.checkpoint writes it."""
    folder = tmp_path / "checkpoint" / "pytorch_model_fsdp_0"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # It warns that there is one process.
        save({"model": WEIGHTS}, checkpoint_id=folder, no_dist=True)
    return folder


@pytest.mark.parametrize("whole", [False, True])
def test_shards_become_one_file_of_weights(shards, whole, tmp_path, capsys):
    source = shards.parent if whole else shards
    assert main(["merge-weights", str(source), str(tmp_path / "out")]) == 0
    file = tmp_path / "out/model.safetensors"
    assert str(file.parent) in capsys.readouterr().out
    merged = load_file(file)
    assert set(merged) == set(WEIGHTS)
    assert all(torch.equal(merged[name], weight) for name, weight in WEIGHTS.items())
    assert shards.is_dir()


def test_the_other_format_and_the_end_of_the_shards_can_be_asked_for(shards, tmp_path, capsys):
    words = ["--unsafe-serialization", "--remove-checkpoint-dir", "--quiet"]
    assert main(["merge-weights", str(shards), str(tmp_path / "out"), *words]) == 0
    merged = torch.load(tmp_path / "out/pytorch_model.bin", weights_only=True)
    assert all(torch.equal(merged[name], weight) for name, weight in WEIGHTS.items())
    assert not shards.exists()
    assert capsys.readouterr().out == ""


def test_a_path_with_an_unknown_scheme_is_refused_by_its_argument(shards, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.iterdir())
    assert main(["merge-weights", "nowhere://bucket/run", str(tmp_path / "out")]) == 2
    assert "argument checkpoint_directory='nowhere://bucket/run'" in capsys.readouterr().err
    assert main(["merge-weights", str(shards), "nowhere://out"]) == 2
    assert "argument output_path='nowhere://out'" in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == before


def test_weights_are_merged_from_store_to_store(shards, capsys):
    files = fsspec.filesystem("memory")
    try:
        for path in shards.iterdir():
            files.pipe_file(f"/bucket/run/{shards.name}/{path.name}", path.read_bytes())
        assert main(["merge-weights", "memory://bucket/run", "memory://bucket/out"]) == 0
        assert "wrote the weights to 'memory://bucket/out'" in capsys.readouterr().out
        merged = load(files.cat_file("/bucket/out/model.safetensors"))
        assert all(torch.equal(merged[name], weight) for name, weight in WEIGHTS.items())
        assert main(["merge-weights", "memory://bucket/nothing", "memory://bucket/out"]) == 2
        assert "'memory://bucket/nothing' does not exist" in capsys.readouterr().err
    finally:
        files.store.clear()


@pytest.mark.parametrize(("name", "part"), [("nowhere", "nowhere"), ("empty", "empty")])
def test_what_holds_no_shards_is_reported(name, part, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    assert main(["merge-weights", str(tmp_path / name), str(tmp_path / "out")]) == 2
    assert part in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
