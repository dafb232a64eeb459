"""Names under the path by which users of Accelerate import them. Written by tools/gen_exports.py."""

import sys
from typing import Any

from accel_state.lazy import LazyModule, attach

attach(__name__, "accel._internal")


class _CallableModule(LazyModule):
    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self.tqdm(*arguments, **options)


# Importing this module binds it in its package, where the name is that of a function.
sys.modules[__name__].__class__ = _CallableModule
