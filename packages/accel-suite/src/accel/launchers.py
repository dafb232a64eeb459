"""Starting processes from a notebook or a test.

Written by tools/gen_exports.py from api.toml and aliases.toml; change it there.
"""

# fmt: off
from __future__ import annotations

from typing import TYPE_CHECKING

from accel_state._lazy import attach

if TYPE_CHECKING:
    from accel_train.launchers import (
        ELASTIC_LOG_LINE_PREFIX_TEMPLATE_PYTORCH_VERSION, debug_launcher, notebook_launcher, test_launch,
    )

__all__ = [
    "ELASTIC_LOG_LINE_PREFIX_TEMPLATE_PYTORCH_VERSION", "debug_launcher", "notebook_launcher",
    "test_launch",
]

_EXPORTS = {
    **dict.fromkeys((
        "ELASTIC_LOG_LINE_PREFIX_TEMPLATE_PYTORCH_VERSION", "debug_launcher", "notebook_launcher",
        "test_launch",
    ), "accel_train.launchers"),
}
__getattr__, __dir__ = attach(__name__, _EXPORTS)
