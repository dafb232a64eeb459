# fmt: off
from accel_cli.programs import (
    BaseConfig as BaseConfig, ClusterConfig as ClusterConfig, SageMakerConfig as SageMakerConfig,
    cache_dir as cache_dir, default_config_file as default_config_file,
    default_json_config_file as default_json_config_file,
    default_yaml_config_file as default_yaml_config_file, load_config_from_file as load_config_from_file,
)
