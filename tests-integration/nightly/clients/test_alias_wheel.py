"""Libraries that ask for a distribution called accelerate get accel's wheel of that name, and find it."""

from __future__ import annotations

import os
import shutil
import subprocess
import venv
import zipfile
from pathlib import Path

import pytest

import build_accelerate_alias
from accel_compat.alias import version_of_accel

UV = os.environ.get("UV") or shutil.which("uv") or "uv"
ASK = """
import diffusers.utils, peft, transformers.utils, trl
import accel, accelerate
assert transformers.utils.is_accelerate_available() and diffusers.utils.is_accelerate_available()
assert accelerate.Accelerator is accel.Accelerator is transformers.trainer.Accelerator
"""


def test_libraries_find_accelerate_where_the_wheel_is_installed(python, clients_environ, tmp_path):
    wheel = build_accelerate_alias.build(tmp_path / "wheels")
    target = tmp_path / "installed"
    subprocess.run([UV, "pip", "install", "-q", "--no-deps", "--target", target, wheel], check=True)
    environ = {**clients_environ, "PYTHONPATH": str(target)}
    subprocess.run([python, "-c", ASK], env=environ, cwd=tmp_path, check=True)


def write_wheel(folder: Path, name: str, version: str, *requires: str) -> None:
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        lines = [f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {line}" for line in requires)]
        wheel.writestr(f"{info}/METADATA", "\n".join(["Metadata-Version: 2.1", *lines, ""]))
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


@pytest.mark.parametrize(
    "words",
    [("-m", "pip", "install", "--constraint"), (UV, "pip", "install", "--overrides")],
    ids=["pip", "uv"],
)
def test_an_override_takes_the_wheel_and_not_a_newer_accelerate_of_the_index(words, tmp_path):
    """As the guide says; the index has a client, and an Accelerate that is newer than the alias."""
    index = tmp_path / "index"
    index.mkdir()
    write_wheel(index, "accel_compat", version_of_accel())
    write_wheel(index, "client", "2.0", "accelerate>=1.0")
    write_wheel(index, "accelerate", "99.0")
    wheel = build_accelerate_alias.build(tmp_path / "wheels")
    (tmp_path / "ours.txt").write_text(f"accelerate @ {wheel.as_uri()}\n")
    venv.create(tmp_path / "venv", with_pip=words[0] == "-m")
    python = tmp_path / "venv/bin/python"
    line = [*words, tmp_path / "ours.txt", "--no-index", f"--find-links={index}", "client"]
    environ = {**os.environ, "VIRTUAL_ENV": str(tmp_path / "venv")}
    subprocess.run([python, *line] if words[0] == "-m" else line, env=environ, check=True)
    say = "from importlib.metadata import version; print(version('accelerate'), version('accel-compat'))"
    done = subprocess.run([python, "-c", say], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [wheel.name.split("-")[1], version_of_accel()]
