"""Training code asks the strategy: no engine is named outside its folder, or imported for others."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import accel_train

ENGINES = ("deepspeed", "megatron", "pipeline", "torchft", "xla")
FILES = sorted(Path(accel_train.__file__).parent.rglob("*.py"))


def imports_of(path: Path) -> set[str]:
    """The modules that a file imports, except for annotations."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    typing_only = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and "TYPE_CHECKING" in ast.unparse(block.test)
        for node in ast.walk(block)
    }
    names: set[str] = set()
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_no_module_imports_an_engine(path: Path):
    engines = tuple(f"accel_plugins.{engine}" for engine in ENGINES)
    assert not [name for name in imports_of(path) if name.startswith(engines)]


PROGRAM = """
import sys, torch
from accel_train import Accelerator
accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(2, 1)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
accelerator.save_state(sys.argv[1])
accelerator.load_state(sys.argv[1])
parts = (name.split(".") for name in sys.modules)
print([part for part in parts if part[0] == "accel_plugins" and {*part[1:2]} & {*sys.argv[2:]}])
"""


def test_a_plain_run_that_saves_and_loads_imports_no_engine(tmp_path: Path):
    line = [sys.executable, "-c", PROGRAM, str(tmp_path / "c"), *ENGINES]
    done = subprocess.run(line, capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout.splitlines()[-1] == "[]"
