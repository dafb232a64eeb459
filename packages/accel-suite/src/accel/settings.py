"""What can be set from outside a script, typed.

Written by tools/gen_exports.py from api.toml and aliases.toml; change it there.
"""

# fmt: off
from __future__ import annotations

from typing import TYPE_CHECKING

from accel_state._lazy import attach

if TYPE_CHECKING:
    from accel_state.settings.engines import (
        DeepSpeedSettings, Fp8Settings, FsdpSettings, MegatronSettings, ParallelismSettings,
    )
    from accel_state.settings.environ import from_environ, to_environ
    from accel_state.settings.model import (
        DynamoSettings, LaunchSettings, PrecisionSettings, ProcessSettings, Settings, TrainingSettings,
    )

__all__ = [
    "DeepSpeedSettings", "DynamoSettings", "Fp8Settings", "FsdpSettings", "LaunchSettings",
    "MegatronSettings", "ParallelismSettings", "PrecisionSettings", "ProcessSettings", "Settings",
    "TrainingSettings", "from_environ", "to_environ",
]

_EXPORTS = {
    **dict.fromkeys((
        "DeepSpeedSettings", "Fp8Settings", "FsdpSettings", "MegatronSettings", "ParallelismSettings",
    ), "accel_state.settings.engines"),
    **dict.fromkeys(("from_environ", "to_environ"), "accel_state.settings.environ"),
    **dict.fromkeys((
        "DynamoSettings", "LaunchSettings", "PrecisionSettings", "ProcessSettings", "Settings",
        "TrainingSettings",
    ), "accel_state.settings.model"),
}
__getattr__, __dir__ = attach(__name__, _EXPORTS)
