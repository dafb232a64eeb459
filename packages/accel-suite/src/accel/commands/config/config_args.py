"""Names under the path by which users of Accelerate import them.

Written by tools/gen_exports.py from api.toml and aliases.toml; change it there.
"""

# fmt: off
from __future__ import annotations

from typing import TYPE_CHECKING

from accel_state._lazy import attach

if TYPE_CHECKING:
    from accel_cli.config_records import (
        BaseConfig, ClusterConfig, SageMakerConfig, cache_dir, default_config_file,
        default_json_config_file, default_yaml_config_file, load_config_from_file,
    )

__all__ = [
    "BaseConfig", "ClusterConfig", "SageMakerConfig", "cache_dir", "default_config_file",
    "default_json_config_file", "default_yaml_config_file", "load_config_from_file",
]

_EXPORTS = {
    **dict.fromkeys((
        "BaseConfig", "ClusterConfig", "SageMakerConfig", "cache_dir", "default_config_file",
        "default_json_config_file", "default_yaml_config_file", "load_config_from_file",
    ), "accel_cli.config_records"),
}
__getattr__, __dir__ = attach(__name__, _EXPORTS)
