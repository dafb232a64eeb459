"""Install the alias in a child process; then do what the environment's own `sitecustomize` does.

The folder is on the PYTHONPATH of children alone, and may be seen by interpreters that have no accel.
"""

import os
import sys
from contextlib import suppress
from importlib.machinery import PathFinder

with suppress(ImportError):
    import accel_compat

    accel_compat.install()

_folder = os.path.dirname(__file__)  # noqa: PTH120 - pathlib would take every child longer to import
_other_paths = [path for path in sys.path if os.path.normpath(path) != os.path.normpath(_folder)]
_spec = PathFinder.find_spec("sitecustomize", _other_paths)
if _spec is not None and _spec.loader is not None:
    _spec.loader.exec_module(sys.modules[__name__])
