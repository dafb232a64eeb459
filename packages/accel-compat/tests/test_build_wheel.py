"""The wheel called `accelerate`: it resolves, installs and imports as accel."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PACKAGES = ("state", "ops", "bigmodel", "plugins", "quant", "trackers", "train", "cli", "suite", "compat")
COMMANDS = ("config", "estimate-memory", "launch", "merge-weights")


def test_the_wheel_installs_in_an_empty_environment_and_is_accel(tmp_path: Path) -> None:
    builder = ROOT / "tools" / "build_accelerate_alias.py"
    uv = os.environ.get("UV") or shutil.which("uv")
    if not builder.exists() or uv is None:
        pytest.skip("the workspace is not here, or uv: the package is tested alone")
    line = [sys.executable, str(builder), "--out", str(tmp_path)]
    wheel = Path(subprocess.run(line, check=True, capture_output=True, text=True).stdout.strip())
    again = Path(subprocess.run(line, check=True, capture_output=True, text=True).stdout.strip())
    assert wheel.read_bytes() == again.read_bytes()
    assert wheel.name == "accelerate-1.15.0-py3-none-any.whl"

    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run([uv, "venv", "--quiet", "--python", sys.executable, str(python.parents[1])], check=True)
    subprocess.run(
        [uv, "pip", "install", "--quiet", "--offline", "--no-deps", "--python", str(python), str(wheel)],
        check=True,
    )
    program = """
import importlib.metadata
import sys
import accelerate
import accelerate.utils
from accelerate.state import PartialState
import accel
assert accelerate.utils is accel.utils
assert accelerate.__spec__.name == "accelerate" and accelerate is sys.modules["accelerate"]
metadata = importlib.metadata.metadata("accelerate")
assert "huggingface" in metadata["Home-page"]
print(accelerate.__version__, metadata["Version"], PartialState.__module__)
print([dist.name for dist in importlib.metadata.distributions() if dist.name == "accelerate"][:1])
"""
    sources = [str(ROOT / "packages" / f"accel-{name}" / "src") for name in PACKAGES]
    libraries = next(path for path in map(Path, sys.path) if (path / "torch").is_dir())
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([*sources, str(libraries)])}
    done = subprocess.run(
        [str(python), "-c", program],
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["1.15.0 1.15.0 accel_state.partial_state", "['accelerate']"]

    (tmp_path / "script.py").write_text("import accelerate; print(accelerate.state.__name__)")
    launched = subprocess.run(
        [str(python.with_name("accelerate")), "launch", "--cpu", "script.py"],
        env={**environ, "HF_HOME": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert launched.returncode == 0, launched.stderr
    assert launched.stdout == "accel.state\n"
    names = {path.name for path in python.parent.glob("accelerate*")}
    assert names == {"accelerate", *(f"accelerate-{name}" for name in COMMANDS)}


def test_the_wheel_requires_this_version_of_accel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not (ROOT / "tools" / "build_accelerate_alias.py").exists():
        pytest.skip("the workspace is not here: the package is tested alone")
    import zipfile

    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import build_accelerate_alias
    from accel_compat.alias import version_of_accel

    with zipfile.ZipFile(build_accelerate_alias.build(tmp_path)) as archive:
        metadata = archive.read("accelerate-1.15.0.dist-info/METADATA").decode()
        record = archive.read("accelerate-1.15.0.dist-info/RECORD").decode()
    assert f"Requires-Dist: accel-compat=={version_of_accel()}" in metadata
    assert {line.split(",")[0] for line in record.splitlines()} == set(archive.namelist())
