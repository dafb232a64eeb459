"""Install the alias in a child process; then do what the environment's own `sitecustomize` does.

The folder is on the PYTHONPATH of children alone, and may be seen by interpreters that have no accel.
"""

import sys
from contextlib import suppress
from importlib.machinery import PathFinder

with suppress(ImportError):
    import accel_compat

    accel_compat.install()

_other_paths = [path for path in sys.path if path.rstrip("/") != __file__.rpartition("/")[0]]
_spec = PathFinder.find_spec("sitecustomize", _other_paths)
if _spec is not None and _spec.loader is not None:
    _spec.loader.exec_module(sys.modules[__name__])
