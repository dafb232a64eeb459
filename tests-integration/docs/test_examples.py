"""Every Python and shell example of the README files and the documentation runs.

A fenced block marked `python` is executed, on two processes if it begins with `# train.py`; one marked
`bash` is run as a command line from the root of the workspace with the installed environment first on the
path; other blocks (`text`) only show. With every commit, the README's first command trains on two processes;
other programs of several processes, and other ways to start that one, run with `tools/check.py --all`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted(ROOT.glob("packages/*/README.md")),
    *sorted(ROOT.glob("packages/*/docs/**/*.md")),
]
BLOCK = re.compile(r"^( *)```(\w+)\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)
PROGRAM = "# train.py\n"
LONG = ("uv run python packages", "uv run torchrun", "uv run accel launch --config_file")
LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)\)")


def blocks(language: str) -> list[pytest.param]:
    found = []
    for page in PAGES:
        text = page.read_text()
        for match in BLOCK.finditer(text):
            if match[2] == language:
                line = text.count("\n", 0, match.start()) + 1
                marks = [pytest.mark.thorough] if match[3].startswith(PROGRAM) else []
                name = f"{page.relative_to(ROOT)}:{line}"
                found.append(pytest.param(page, line, match[3], id=name, marks=marks))
    return found


def commands() -> list[pytest.param]:
    """The lines of the shell examples, each once, under the first page that has it."""
    pages: dict[str, Path] = {}
    for block in blocks("bash"):
        for command in block.values[2].splitlines():
            pages.setdefault(command, block.values[0])
    return [
        pytest.param(
            command,
            id=f"{page.relative_to(ROOT)}: {command}",
            marks=[pytest.mark.thorough] if command.startswith(LONG) else [],
        )
        for command, page in pages.items()
    ]


@pytest.mark.parametrize(("page", "line", "code"), blocks("python"))
def test_a_python_example_runs(
    page: Path, line: int, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if code.startswith("# with torch_xla"):
        pytest.skip("tools/check_xla.py runs it, in an environment that has torch_xla")
    monkeypatch.chdir(tmp_path)
    if code.startswith(PROGRAM):
        (tmp_path / "train.py").write_text(code)
        launch = [sys.executable, "-m", "accel_cli", "launch", "--cpu", "--num_processes", "2", "train.py"]
        subprocess.run(launch, check=True)
        return
    if "accel_compat.install()" in code:  # which no other test in this process would expect
        subprocess.run([sys.executable, "-c", code], check=True)
        return
    exec(compile("\n" * line + code, page, "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("command", commands())
def test_a_shell_example_runs(command: str) -> None:
    command = command.removeprefix("pip install uv && ").removeprefix("uv run ")
    if command == "tools/check.py":
        pytest.skip("this is the command that runs these tests")
    if command.startswith("tools/"):
        command = f"{sys.executable} {command}"
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        command.split(),
        cwd=ROOT,
        env={
            **os.environ,
            "PATH": path,
            "OMP_NUM_THREADS": "1",
        },  # the model is small, the machine may be busy
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    if "digits.py" in command:
        check_digits(done.stdout, done.stderr, processes=2 if "2" in command else 1)


def check_digits(output: str, progress: str, *, processes: int) -> None:
    """One bar, one line about accuracy and one about time, every held-out image once."""
    assert len(re.findall(r"\| 0/\d+ \[", progress)) == 1  # a slow first step shows 0% again
    (accuracy,) = re.findall(r"held-out accuracy (0\.\d+|1\.0+) \(\d+ of 360 images\)", output)
    assert float(accuracy) >= 0.97
    (wall,) = re.findall(rf"wall time (\d+\.\d) s, {processes} process", output)
    assert float(wall) > 0


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    broken = [target for target in LINK.findall(page.read_text()) if not (page.parent / target).exists()]
    assert not broken
