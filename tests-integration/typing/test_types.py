"""Types reach the user, also as `accelerate`: mypy agrees with pyright about what is asserted."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import zipfile
from inspect import isfunction
from pathlib import Path

import pytest

import accel
from accel.state import AcceleratorState, GradientState, PartialState

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]


@pytest.mark.thorough
def test_mypy_finds_the_types_that_are_asserted() -> None:
    sources = os.pathsep.join(str(path) for path in sorted(ROOT.glob("packages/*/src")))
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "mypy",
            f"--config-file={FOLDER / 'mypy.ini'}",
            f"--cache-dir={ROOT / 'build' / 'mypy'}",
            *(str(path) for path in sorted(FOLDER.glob("assert_*.py"))),
        ],
        cwd=ROOT,
        env={**os.environ, "MYPYPATH": sources},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_public_member_has_a_case() -> None:
    named = {
        node.attr if isinstance(node, ast.Attribute) else node.id
        for path in FOLDER.glob("assert_*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute | ast.Name)
    }
    owners = (accel.Accelerator, PartialState, AcceleratorState, GradientState)
    public = {name for owner in owners for name in dir(owner) if not name.startswith("_")}
    functions = {name for name in dir(accel) if isfunction(getattr(accel, name))}
    assert public | functions <= named, sorted((public | functions) - named)


ALIAS = """from typing import assert_type

import accelerate
from accelerate import Accelerator
from accelerate.commands.launch import launch_command_parser
from accelerate.utils import GradientAccumulationPlugin, is_bf16_available, set_seed

assert_type(accelerate.__version__, str)
assert_type(is_bf16_available(), bool)
assert_type(Accelerator().num_processes, int)
assert_type(GradientAccumulationPlugin(num_steps=2).num_steps, int | None)
launch_command_parser().no_such_method()
set_seed("zero")
"""
"""A program, right but for its last two lines."""

WRONG = {12, 13}


@pytest.fixture(scope="module")
def alias(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the unpacked wheel called `accelerate` and a program that imports it."""
    folder = tmp_path_factory.mktemp("alias")
    builder = [sys.executable, str(ROOT / "tools" / "build_accelerate_alias.py"), "--out", str(folder)]
    wheel = subprocess.run(builder, check=True, capture_output=True, text=True).stdout.strip()
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    (folder / "program.py").write_text(ALIAS)
    return folder


def wrong_lines(output: str) -> set[int]:
    """The numbers of the lines of the program about which a type checker complains."""
    errors = [line for line in output.splitlines() if "program.py:" in line and "error: " in line]
    return {int(line.partition("program.py:")[2].split(":")[0]) for line in errors}


@pytest.mark.thorough
def test_mypy_finds_the_types_of_the_alias(alias: Path) -> None:
    sources = [str(path) for path in sorted(ROOT.glob("packages/*/src"))]
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "mypy",
            f"--config-file={FOLDER / 'mypy.ini'}",
            f"--cache-dir={ROOT / 'build' / 'mypy'}",
            "program.py",
        ],
        cwd=alias,
        env={**os.environ, "MYPYPATH": os.pathsep.join([str(alias / "site"), *sources])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert wrong_lines(done.stdout) == WRONG, done.stdout + done.stderr


def test_pyright_finds_the_types_of_the_alias(alias: Path) -> None:
    sources = [str(path) for path in sorted(ROOT.glob("packages/*/src"))]
    settings = {"extraPaths": [str(alias / "site"), *sources]}
    (alias / "pyrightconfig.json").write_text(json.dumps(settings))
    done = subprocess.run(
        [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "program.py"],
        cwd=alias,
        capture_output=True,
        text=True,
        check=False,
    )
    assert wrong_lines(done.stdout) == WRONG, done.stdout + done.stderr
