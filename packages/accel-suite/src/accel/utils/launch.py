"""Names under the path by which users of Accelerate import them.

Written by tools/gen_exports.py from api.toml and aliases.toml; change it there.
"""

# fmt: off
from __future__ import annotations

from typing import TYPE_CHECKING

from accel_state._lazy import attach

if TYPE_CHECKING:
    from accel_cli.launch.namespace import (
        prepare_deepspeed_cmd_env, prepare_multi_gpu_env, prepare_sagemager_args_inputs,
        prepare_simple_launcher_cmd_env, prepare_tpu,
    )
    from accel_train.launchers import PrepareForLaunch

__all__ = [
    "PrepareForLaunch", "prepare_deepspeed_cmd_env", "prepare_multi_gpu_env",
    "prepare_sagemager_args_inputs", "prepare_simple_launcher_cmd_env", "prepare_tpu",
]

_EXPORTS = {
    **dict.fromkeys((
        "_convert_nargs_to_dict", "prepare_deepspeed_cmd_env", "prepare_multi_gpu_env",
        "prepare_sagemager_args_inputs", "prepare_simple_launcher_cmd_env", "prepare_tpu",
    ), "accel_cli.launch.namespace"),
    **dict.fromkeys(("PrepareForLaunch",), "accel_train.launchers"),
}
__getattr__, __dir__ = attach(__name__, _EXPORTS)
