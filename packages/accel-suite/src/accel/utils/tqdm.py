"""Names under the path by which users of Accelerate import them."""

import sys
from typing import Any

from accel_state.lazy import LazyModule, attach

attach(__name__, "accel._internal")


class _CallableModule(LazyModule):
    def __call__(self, *args: Any, main_process_only: bool = True, **kwargs: Any) -> Any:
        return self.tqdm(*args, main_process_only=main_process_only, **kwargs)


# Importing this module binds it in its package, where the name is that of a function.
sys.modules[__name__].__class__ = _CallableModule
