"""Names under the path by which users of Accelerate import them.

Written by tools/gen_exports.py from api.toml and aliases.toml; change it there.
"""

# fmt: off
from __future__ import annotations

from typing import TYPE_CHECKING

from accel_state._lazy import attach

if TYPE_CHECKING:
    from accel.commands.config import config_args as config_args
    from accel.commands.config import default as default
    from accel_cli.command_functions import config_command, get_config_parser
    from accel_cli.config.basic import write_basic_config
    from accel_cli.config_records import (
        BaseConfig, ClusterConfig, SageMakerConfig, cache_dir, default_config_file,
        default_json_config_file, default_yaml_config_file, load_config_from_file,
    )

__all__ = [
    "BaseConfig", "ClusterConfig", "SageMakerConfig", "cache_dir", "config_command", "default_config_file",
    "default_json_config_file", "default_yaml_config_file", "get_config_parser", "load_config_from_file",
    "write_basic_config",
]

_EXPORTS = {
    "config_args": "accel.commands.config.config_args:",
    "default": "accel.commands.config.default:",
    **dict.fromkeys(("config_command", "get_config_parser"), "accel_cli.command_functions"),
    **dict.fromkeys(("write_basic_config",), "accel_cli.config.basic"),
    **dict.fromkeys((
        "BaseConfig", "ClusterConfig", "SageMakerConfig", "cache_dir", "default_config_file",
        "default_json_config_file", "default_yaml_config_file", "load_config_from_file",
    ), "accel_cli.config_records"),
}
__getattr__, __dir__ = attach(__name__, _EXPORTS)
