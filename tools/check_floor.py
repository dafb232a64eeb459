"""Run the packages' own tests with the oldest version of each library that their ranges accept.

The newest are in uv.lock, which everything else uses. uv makes the environment, build/floor, from the ranges
in the metadata of the packages; a moment if it is there already. Left out are libraries whose oldest version
is the newest too or has no wheel, and torchao, which needs a newer PyTorch.

    uv run tools/check_floor.py [OPTION OR TEST OF PYTEST ...]
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from handle_signals import handle_signals

ROOT = Path(__file__).resolve().parents[1]
PYTHON = str(ROOT / "build" / "floor" / "bin" / "python")
EXTRAS = {
    "accel-bigmodel": "[hub]",
    "accel-cli": "[kubeflow]",
    "accel-inspect": "[hub,timm,transformers]",
    "accel-quant": "[bnb]",
    "accel-trackers": "[clearml,comet-ml,dvclive,mlflow,swanlab,tensorboard,trackio,wandb]",
    "accel-train": "[remote,stateful]",
}
TESTS_NEED = ("hypothesis>=6.140", "pytest>=8.2", "pytest-xdist>=3.6", "safetensors>=0.8")
WARNS = "pynvml"
"""Older trackers require it, and torch warns where it is: what it has is in nvidia-ml-py as well."""


def main(argv: list[str] | None = None) -> int:
    """Make the environment and run pytest in it; return its exit code."""
    handle_signals()
    uv = os.environ.get("UV") or shutil.which("uv") or "uv"
    environ = {name: value for name, value in os.environ.items() if name not in {"VIRTUAL_ENV", "PYTHONPATH"}}
    members = [path.parent.name for path in sorted(ROOT.glob("packages/*/pyproject.toml"))]
    editable = [f"--editable=packages/{name}{EXTRAS.get(name, '')}" for name in members]
    install = ["install", "--resolution=lowest-direct", *editable, *TESTS_NEED]
    for command in (
        ["venv", "--allow-existing", "build/floor"],
        ["pip", *install],
        ["pip", "uninstall", WARNS],
    ):
        python = ["--python", sys.executable if command[0] == "venv" else PYTHON]
        subprocess.run([uv, *command, "--quiet", *python], cwd=ROOT, env=environ, check=True)
    line = [PYTHON, "-m", "pytest", "-q", "--color=no", *(sys.argv[1:] if argv is None else argv)]
    return subprocess.run(line, cwd=ROOT, env=environ, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
