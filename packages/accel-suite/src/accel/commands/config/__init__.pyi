# fmt: off
from accel.commands.config import (
    cluster as cluster, config as config, config_args as config_args, default as default,
    sagemaker as sagemaker, update as update,
)
from accel_cli.commands.config import write_basic_config as write_basic_config
from accel_cli.programs import (
    BaseConfig as BaseConfig, ClusterConfig as ClusterConfig, SageMakerConfig as SageMakerConfig,
    cache_dir as cache_dir, config_command as config_command, default_config_file as default_config_file,
    default_json_config_file as default_json_config_file,
    default_yaml_config_file as default_yaml_config_file, get_config_parser as get_config_parser,
    load_config_from_file as load_config_from_file,
)
def main() -> int: ...
