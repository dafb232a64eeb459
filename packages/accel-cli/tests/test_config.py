"""Config files are written, updated and rewritten for FSDP2."""

from __future__ import annotations

import pytest
import yaml

from accel_cli.commands import config
from accel_cli.commands.config import REMOVED, RESHARD, to_fsdp2
from accel_cli.config_file import format_config, read_config, write
from accel_cli.main import main
from accel_state.errors import SettingsError
from accel_state.settings import merge_layers


def fsdp_content(**fsdp):
    return {"distributed_type": "FSDP", "num_processes": 8, "fsdp_config": fsdp}


@pytest.mark.parametrize(("name", "reshard"), RESHARD.items())
def test_the_sharding_strategy_says_whether_to_reshard(name, reshard):
    for spelled in (name, name.lower()):
        new = to_fsdp2(fsdp_content(fsdp_sharding_strategy=spelled))[0]["fsdp_config"]
        assert new == {"fsdp_version": 2, "fsdp_reshard_after_forward": reshard}


@pytest.mark.parametrize(("value", "reshard"), [(1, True), ("2", False), (4, True)])
def test_older_files_number_the_strategies(value, reshard):
    assert to_fsdp2(fsdp_content(fsdp_sharding_strategy=value))[0]["fsdp_config"] == {
        "fsdp_version": 2,
        "fsdp_reshard_after_forward": reshard,
    }


def test_every_key_is_kept_or_removed_with_its_reason_and_everything_else_stays():
    values = {key: f"value of {key}" for key in ("fsdp_offload_params", "fsdp_colour", *REMOVED)}
    old = fsdp_content(fsdp_version=1, **values)
    converted, notes = to_fsdp2(old)
    kept = {key: value for key, value in values.items() if key not in REMOVED}
    assert converted == {**old, "fsdp_config": {"fsdp_version": 2, **kept}}
    assert [key for key in REMOVED if not any(key in note for note in notes)] == []
    assert old["fsdp_config"]["fsdp_version"] == 1  # the given config is left alone


def test_a_state_dict_of_local_shards_becomes_one_of_shards():
    converted, notes = to_fsdp2(fsdp_content(fsdp_state_dict_type="LOCAL_STATE_DICT"))
    assert converted["fsdp_config"]["fsdp_state_dict_type"] == "SHARDED_STATE_DICT"
    assert "LOCAL_STATE_DICT" in notes[0]


def test_a_hybrid_strategy_names_the_key_of_its_replicas():
    _, notes = to_fsdp2(fsdp_content(fsdp_sharding_strategy="HYBRID_SHARD"))
    assert any("dp_replicate_size" in note for note in notes)


@pytest.mark.parametrize(
    ("old", "parts"),
    [
        ({}, ["fsdp_config", "None"]),
        (fsdp_content(fsdp_version=2), ["fsdp_version", "already"]),
        (fsdp_content(fsdp_version="2"), ["already"]),
        (fsdp_content(fsdp_sharding_strategy="NO_SHARD"), ["NO_SHARD", "MULTI_GPU"]),
        (fsdp_content(fsdp_sharding_strategy=3), ["3", "MULTI_GPU"]),
        (fsdp_content(fsdp_sharding_strategy="sideways"), ["'sideways'", "FULL_SHARD"]),
    ],
)
def test_what_cannot_be_rewritten_is_reported(old, parts):
    with pytest.raises(SettingsError) as caught:
        to_fsdp2(old)
    assert [part for part in parts if part not in str(caught.value)] == []


def test_the_command_writes_a_new_file_and_never_over_another_one_unasked(tmp_path, capsys):
    source, target = tmp_path / "old.yaml", tmp_path / "new.yaml"
    source.write_text(
        yaml.safe_dump(fsdp_content(fsdp_sharding_strategy="FULL_SHARD", fsdp_use_orig_params=True))
    )
    line = ["to-fsdp2", "--config_file", str(source), "--output_file", str(target)]
    assert main(line) == 0
    assert "fsdp_use_orig_params was removed" in capsys.readouterr().out
    written = yaml.safe_load(target.read_text())
    assert written == fsdp_content(fsdp_version=2, fsdp_reshard_after_forward=True)
    assert main(line) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert main([*line, "--overwrite"]) == 0
    assert main(["to-fsdp2", "--config_file", str(source)]) == 2
    assert main(["to-fsdp2", "--config_file", str(source), "--overwrite", "--quiet"]) == 0
    assert yaml.safe_load(source.read_text()) == written
    assert capsys.readouterr().out.count("wrote") == 1


@pytest.fixture
def environ(monkeypatch, tmp_path):
    outside = {"HF_HOME": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    monkeypatch.setattr(config, "read", lambda: outside)
    return outside


def test_a_file_for_this_machine_is_written_once(environ, tmp_path, capsys):
    path = tmp_path / "accelerate/default_config.yaml"
    assert main(["config", "default", "--mixed_precision", "bf16"]) == 0
    output = capsys.readouterr().out
    assert f"Written to {path}." in output
    assert "is also the default config file of Accelerate" in " ".join(output.split())
    assert yaml.safe_load(path.read_text())["num_processes"] == 1
    settings = merge_layers(read_config(None, environ).sourced).settings
    assert settings.precision.mixed_precision == "bf16"
    assert settings.process.use_cpu
    before = path.read_text()
    assert main(["config", "default"]) == 0
    assert "unchanged" in capsys.readouterr().out
    assert path.read_text() == before


@pytest.mark.parametrize("suffix", ["yaml", "json"])
def test_a_file_of_an_older_format_is_rewritten(environ, tmp_path, capsys, suffix):
    path = tmp_path / f"old.{suffix}"
    write(path, {"fp16": True, "num_processes": 2, "distributed_type": "TPU"})
    assert main(["config", "update", "--config_file", str(path)]) == 0
    assert "'fp16: True' is 'mixed_precision: fp16' now" in capsys.readouterr().out
    found = read_config(str(path), environ)
    assert found.notes == ()
    assert found.content["mixed_precision"] == "fp16"
    assert found.content["distributed_type"] == "XLA"


def test_there_must_be_a_file_to_update(environ):
    with pytest.raises(SettingsError, match="no config file"):
        config.update_config_file(None)


def test_no_precision_but_a_known_one_is_written(environ):
    with pytest.raises(SettingsError, match=r"mixed_precision='bf61'"):
        config.write_basic_config("bf61")


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(SettingsError, match="cannot be written"):
        write(tmp_path / "file/run.yaml", {})
    assert format_config(tmp_path / "a.json", {"a": 1}) == '{\n  "a": 1\n}\n'
