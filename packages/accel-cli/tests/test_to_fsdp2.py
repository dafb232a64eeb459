from __future__ import annotations

import pytest
import yaml

from accel_cli.commands.config import REMOVED, RESHARD, UNCHANGED, to_fsdp2
from accel_cli.main import main
from accel_state.errors import SettingsError


def config(**fsdp):
    return {"distributed_type": "FSDP", "num_processes": 8, "fsdp_config": fsdp}


@pytest.mark.parametrize(("name", "reshard"), RESHARD.items())
def test_the_sharding_strategy_says_whether_to_reshard(name, reshard):
    for spelled in (name, name.lower()):
        new = to_fsdp2(config(fsdp_sharding_strategy=spelled)).config["fsdp_config"]
        assert new == {"fsdp_version": 2, "fsdp_reshard_after_forward": reshard}


@pytest.mark.parametrize(("value", "reshard"), [(1, True), ("2", False), (4, True)])
def test_older_files_number_the_strategies(value, reshard):
    assert to_fsdp2(config(fsdp_sharding_strategy=value)).config["fsdp_config"] == {
        "fsdp_version": 2,
        "fsdp_reshard_after_forward": reshard,
    }


def test_every_key_is_kept_or_removed_with_its_reason_and_everything_else_stays():
    values = {key: f"value of {key}" for key in (*UNCHANGED, *REMOVED)}
    old = config(fsdp_version=1, **values)
    converted = to_fsdp2(old)
    assert converted.config == {
        **old,
        "fsdp_config": {"fsdp_version": 2, **{key: values[key] for key in UNCHANGED}},
    }
    assert [key for key in REMOVED if not any(key in note for note in converted.notes)] == []
    assert old["fsdp_config"]["fsdp_version"] == 1  # the given config is left alone


def test_a_state_dict_of_local_shards_becomes_one_of_shards():
    converted = to_fsdp2(config(fsdp_state_dict_type="LOCAL_STATE_DICT"))
    assert converted.config["fsdp_config"]["fsdp_state_dict_type"] == "SHARDED_STATE_DICT"
    assert "LOCAL_STATE_DICT" in converted.notes[0]


def test_a_hybrid_strategy_is_refused_with_the_key_of_its_replicas():
    assert any(
        "dp_replicate_size" in note for note in to_fsdp2(config(fsdp_sharding_strategy="HYBRID_SHARD")).notes
    )


@pytest.mark.parametrize(
    ("old", "parts"),
    [
        ({}, ["fsdp_config", "None"]),
        (config(fsdp_version=2), ["fsdp_version", "already"]),
        (config(fsdp_version="2"), ["already"]),
        (config(fsdp_sharding_strategy="NO_SHARD"), ["NO_SHARD", "MULTI_GPU"]),
        (config(fsdp_sharding_strategy=3), ["3", "MULTI_GPU"]),
        (config(fsdp_sharding_strategy="sideways"), ["'sideways'", "FULL_SHARD"]),
        (config(fsdp_colour="red"), ["fsdp_colour"]),
    ],
)
def test_what_cannot_be_rewritten_is_reported(old, parts):
    with pytest.raises(SettingsError) as caught:
        to_fsdp2(old)
    assert [part for part in parts if part not in str(caught.value)] == []


def test_the_command_writes_a_new_file_and_never_over_another_one_unasked(tmp_path, capsys):
    source, target = tmp_path / "old.yaml", tmp_path / "new.yaml"
    source.write_text(yaml.safe_dump(config(fsdp_sharding_strategy="FULL_SHARD", fsdp_use_orig_params=True)))
    line = ["to-fsdp2", "--config_file", str(source), "--output_file", str(target)]
    assert main(line) == 0
    assert "fsdp_use_orig_params was removed" in capsys.readouterr().out
    written = yaml.safe_load(target.read_text())
    assert written == config(fsdp_version=2, fsdp_reshard_after_forward=True)
    assert main(line) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert main([*line, "--overwrite"]) == 0
    assert main(["to-fsdp2", "--config_file", str(source)]) == 2
    assert main(["to-fsdp2", "--config_file", str(source), "--overwrite", "--quiet"]) == 0
    assert yaml.safe_load(source.read_text()) == written
    assert capsys.readouterr().out.count("wrote") == 1
