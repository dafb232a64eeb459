from __future__ import annotations

import json
import pickle
import py_compile
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from accel_cli.launch.worker import ERROR_FILE


@pytest.fixture
def work(tmp_path):
    """Run a script as a worker; give how it ended and what it wrote down."""

    def run(source, *line, before=(), **environ):
        (tmp_path / "script.py").write_text(source)
        command = [
            sys.executable,
            "-m",
            "accel_cli.launch.worker",
            *before,
            str(tmp_path / "script.py"),
            *line,
        ]
        error = tmp_path / "error.json"
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, env={ERROR_FILE: str(error), **environ}
        )
        return done, json.loads(error.read_text()) if error.exists() else None

    return run


def test_a_traceback_is_left_to_the_launcher_without_our_own_frames(work, tmp_path):
    done, noted = work("def f():\n    raise ValueError('boom')\nf()\n")
    assert (done.returncode, done.stderr) == (1, "")
    assert noted["message"]["message"] == "ValueError: boom"
    trace = noted["message"]["extraInfo"]["py_callstack"]
    assert trace.count("File ") == 2
    assert "worker.py" not in trace
    assert trace.rstrip().endswith("ValueError: boom")


def test_an_interrupt_tells_where_it_came_and_nothing_else(work):
    _, noted = work("try:\n    1 / 0\nexcept ZeroDivisionError:\n    raise KeyboardInterrupt\n")
    trace = noted["message"]["extraInfo"]["py_callstack"]
    assert (trace.count("Traceback"), trace.count("File ")) == (1, 1)


def test_aloud_shows_the_traceback_where_it_happens(work):
    done, noted = work("1 / 0", before=["--aloud"])
    first, *_, last = done.stderr.splitlines()
    assert first == "accel launch: rank 0 failed with ZeroDivisionError: division by zero"
    assert last == "ZeroDivisionError: division by zero"
    assert "script_runner.py" not in done.stderr
    assert noted is None


@pytest.mark.parametrize(
    ("body", "code"), [("raise SystemExit(7)", 7), ("pass", 0), ("import os; os._exit(3)", 3)]
)
def test_the_exit_code_is_the_scripts(work, body, code):
    done, noted = work(body)
    assert (done.returncode, noted) == (code, None)


def test_an_excepthook_of_the_script_is_used(work):
    done, _ = work("import sys\nsys.excepthook = lambda *error: print('mine')\n1 / 0")
    assert done.stdout == "mine\n"


def test_classes_of_the_script_can_be_pickled(work):
    source = (
        "import pickle, multiprocessing\nclass A:\n    pass\n"
        "def f(a):\n    return type(a).__name__\n"
        "if __name__ == '__main__':\n"
        "    assert type(pickle.loads(pickle.dumps(A()))) is A\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool:\n"
        "        print(pool.map(f, [A()]))\n"
    )
    done, _ = work(source)
    assert (done.stdout, done.stderr) == ("['A']\n", "")
    assert pickle.HIGHEST_PROTOCOL


def test_the_path_of_a_script_is_absolute_as_in_python(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(
        "import sys\nprint(__file__, sys._getframe().f_code.co_filename, __loader__.path, sys.argv)\n"
    )
    for command in (["script.py"], ["-m", "accel_cli.launch.worker", "script.py"]):
        done = subprocess.run(
            [sys.executable, *command], capture_output=True, text=True, check=True, cwd=tmp_path
        )
        assert done.stdout == f"{path} {path} {path} ['script.py']\n"


def test_a_module_is_run_as_python_would(tmp_path):
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg/__init__.py").touch()
    (tmp_path / "pkg/__main__.py").write_text("import sys\nprint(__name__, __package__, sys.argv[1:])\n")
    command = [sys.executable, "-m", "accel_cli.launch.worker", "-m", "pkg", "--lr", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout == "__main__ pkg ['--lr', '1']\n"


@pytest.mark.parametrize("form", ["folder", "zip", "pyc"])
def test_what_python_runs_is_run(tmp_path, form):
    source = tmp_path / "app" / "__main__.py"
    source.parent.mkdir()
    source.write_text("import sys, other\nprint(__name__, sys.argv[1:], other.VALUE)\n")
    (tmp_path / "app" / "other.py").write_text("VALUE = 7\n")
    script = source.parent
    if form == "zip":
        script = Path(shutil.make_archive(str(tmp_path / "packed"), "zip", source.parent))
    elif form == "pyc":
        script = source.parent / "compiled.pyc"
        py_compile.compile(str(source), str(script))
    line = [sys.executable, "-m", "accel_cli.launch.worker", str(script), "--lr", "1"]
    done = subprocess.run(line, capture_output=True, text=True, check=False, cwd=tmp_path)
    plain = subprocess.run(
        [sys.executable, str(script), "--lr", "1"], capture_output=True, text=True, check=True
    )
    assert (done.stderr, done.stdout) == ("", plain.stdout)
    assert done.stdout == "__main__ ['--lr', '1'] 7\n"
