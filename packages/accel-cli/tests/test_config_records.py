"""Config files as records: what a file says, nothing lost on the way back."""

from __future__ import annotations

import dataclasses

import pytest
import yaml

from accel_cli import programs
from accel_cli.programs import ClusterConfig, SageMakerConfig, load_config_from_file
from accel_state.errors import SettingsError
from accel_state.labels import ComputeEnvironment, DistributedType
from accel_state.settings.model import BY_KEY

CONTENT = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "FSDP",
    "mixed_precision": "bf16",
    "use_cpu": False,
    "debug": False,
    "num_processes": 2,
    "fsdp_config": {"fsdp_version": 2},
}


@pytest.mark.parametrize("name", ["c.yaml", "c.json"])
def test_a_file_comes_back_as_it_was_written(tmp_path, name):
    path = tmp_path / name
    path.write_text(yaml.safe_dump(CONTENT) if name == "c.yaml" else __import__("json").dumps(CONTENT))
    config = load_config_from_file(str(path))
    assert isinstance(config, ClusterConfig)
    assert (config.compute_environment, config.distributed_type) == (
        ComputeEnvironment.LOCAL_MACHINE,
        DistributedType.FSDP,
    )
    assert CONTENT.items() <= config.to_dict().items()
    again = tmp_path / f"again_{name}"
    (config.to_yaml_file if name == "c.yaml" else config.to_json_file)(str(again))
    read = ClusterConfig.from_yaml_file if name == "c.yaml" else ClusterConfig.from_json_file
    assert read(str(again)) == load_config_from_file(str(again)) == config


def test_no_as_yaml_reads_it_is_no_precision(tmp_path):
    (tmp_path / "c.yaml").write_text("distributed_type: NO\nmixed_precision: no\n")
    assert load_config_from_file(str(tmp_path / "c.yaml")).to_dict()["mixed_precision"] == "no"


def test_a_job_on_sagemaker_is_its_own_record(tmp_path):
    (tmp_path / "c.yaml").write_text(
        "compute_environment: AMAZON_SAGEMAKER\nec2_instance_type: ml.g5.xlarge\niam_role_name: role\n"
    )
    config = load_config_from_file(str(tmp_path / "c.yaml"))
    assert isinstance(config, SageMakerConfig)
    assert config.ec2_instance_type == "ml.g5.xlarge"


def test_what_cannot_be_used_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no config file"):
        load_config_from_file(str(tmp_path / "none.yaml"))
    with pytest.raises(SettingsError, match="num_processes"):
        ClusterConfig("LOCAL_MACHINE", "NO", "no", use_cpu=True, debug=False, num_processes="many")
    with pytest.raises(SettingsError, match=r"suffix has to be \.json"):
        ClusterConfig("LOCAL_MACHINE", "NO", "no", use_cpu=True, debug=False).to_json_file("c.yaml")


def test_keys_that_only_accel_has_are_kept(tmp_path):
    (tmp_path / "c.yaml").write_text("gradient_accumulation_steps: 4\nas_accelerate: true\n")
    config = load_config_from_file(str(tmp_path / "c.yaml"))
    assert config.further == {"gradient_accumulation_steps": 4, "as_accelerate": True}
    config.to_yaml_file(str(tmp_path / "again.yaml"))
    assert load_config_from_file(str(tmp_path / "again.yaml")) == config


def test_the_fields_are_keys_that_a_file_can_have():
    fields = {field.name for kind in (ClusterConfig, SageMakerConfig) for field in dataclasses.fields(kind)}
    assert fields - {"further"} <= {key.partition(".")[0] for key in BY_KEY}
    assert programs.default_config_file.startswith(programs.cache_dir)
