"""Run a script or a module in which `import accelerate` resolves to accel.

python -m accel_compat train.py [arguments]
python -m accel_compat -m package.module [arguments]
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from accel_compat.alias import install

USAGE = "usage: python -m accel_compat (SCRIPT | -m MODULE) [ARGUMENT ...]"


def main(arguments: list[str]) -> None:
    """Run the script or module in the arguments, as Python itself would."""
    match arguments:
        case ["-m", module, *words]:
            install()
            sys.argv = [module, *words]
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        case [script, *words] if not script.startswith("-"):
            install()
            sys.argv = [script, *words]
            sys.path[0] = str(Path(script).resolve().parent)
            runpy.run_path(script, run_name="__main__")
        case _:
            sys.exit(USAGE)


if __name__ == "__main__":
    main(sys.argv[1:])
