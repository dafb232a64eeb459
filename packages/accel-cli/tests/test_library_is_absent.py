"""What `accel launch` says where the library that a script imports is not installed."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from accel_cli.main import main

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def without_accel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "accel", None)  # as Python itself marks a module that is not there


@pytest.mark.parametrize("processes", ["1", "2"])
@pytest.mark.parametrize("line", ["from accel import Accelerator", "import torch, accel.utils"])
def test_a_script_that_imports_the_library_is_refused_with_the_way_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, processes: str
) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"{line}\n")
    assert main(["launch", "--cpu", "--num_processes", processes, str(script)]) == 2
    assert capsys.readouterr().err == (
        f"accel launch: error: {str(script)!r} imports accel, but only the command is "
        "installed: `pip install accel-suite`.\n"
    )


@pytest.mark.parametrize(
    "text", ["import torch\n", "from accelerate import Accelerator\n", "from . import accel\n", "no python"]
)
def test_other_scripts_are_left_to_python(tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "train.py"
    script.write_text(text)
    started: list[object] = []
    monkeypatch.setattr("accel_cli.launch.command.become", lambda job: started.append(job) or 0)
    assert main(["launch", "--cpu", "--num_processes", "2", str(script)]) == 0
    assert started


def test_a_module_of_that_name_beside_the_script_is_the_users_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "accel.py").touch()
    script = tmp_path / "train.py"
    script.write_text("import accel\n")
    monkeypatch.setattr("accel_cli.launch.command.become", lambda job: 0)
    assert main(["launch", "--cpu", str(script)]) == 0
