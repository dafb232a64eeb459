"""A third party's subcommand: installed by entry point, run by its name."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from extending.installed import install


@pytest.fixture
def accel(tmp_path):
    folder = install(tmp_path / "site")
    (tmp_path / "three.txt").write_text("a\nb\nc\n")
    (tmp_path / "empty.txt").write_text("")

    def run(*words):
        environ = {**os.environ, "PYTHONPATH": str(folder)}
        line = [sys.executable, "-m", "accel_cli", *words]
        return subprocess.run(line, env=environ, cwd=tmp_path, capture_output=True, text=True, check=False)

    return run


def test_an_installed_command_runs_with_its_words_and_its_exit_code(accel):
    done = accel("count-lines", "three.txt")
    assert (done.returncode, done.stdout, done.stderr) == (0, "3\n", "")
    assert accel("count-lines", "empty.txt").returncode == 1


def test_the_overview_shows_it_with_the_first_line_of_its_docstring(accel):
    assert "  count-lines         Count the lines of a file.\n" in accel("--help").stdout


def test_its_errors_and_its_name_are_reported_as_those_of_other_commands(accel):
    done = accel("count-lines", "none.txt")
    assert (done.returncode, done.stderr) == (
        2,
        "accel count-lines: error: 'none.txt': No such file or directory.\n",
    )
    done = accel("count-line")
    assert done.returncode == 2
    assert "did you mean 'count-lines'?" in done.stderr
