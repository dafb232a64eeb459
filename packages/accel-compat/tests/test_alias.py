"""`import accelerate` is accel: one identity, its own version, children included, nothing imported early."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from accel_compat import REFERENCE_VERSION

INSTALL = "import accel_compat; accel_compat.install()\n"


def run(program: str, *arguments: str) -> str:
    """Run a program in a fresh interpreter; return what it prints."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program, *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_submodules_are_the_same_objects_under_both_names() -> None:
    program = """
import accelerate.utils.operations as alias
import accel.utils.operations as ours
from accelerate.utils import operations
import accelerate.utils, accel.utils
assert alias is ours is operations
assert accelerate.__file__ == accel.__file__
assert accelerate.utils is accel.utils
assert ours.__spec__.name == ours.__name__ == "accel.utils.operations"
"""
    run(INSTALL + program)


PROGRAMS = {
    "objects keep one identity and pickles go both ways": """
import pickle
import accel, accelerate
from accelerate.state import PartialState
from accelerate.utils import DistributedType
assert accelerate.Accelerator is accel.Accelerator
assert PartialState is accel.PartialState
assert pickle.loads(pickle.dumps(DistributedType.NO)) is accel.DistributedType.NO
assert pickle.loads(b"caccelerate.utils.dataclasses\\nDistributedType\\n.") is accel.DistributedType
assert isinstance(accel.Accelerator(cpu=True), accelerate.Accelerator)
""",
    "asking whether a name is there is no error": """
import accelerate.state, accelerate.utils
for module in (accelerate, accelerate.state, accelerate.utils):
    assert not hasattr(module, "Nothing")
    assert getattr(module, "Nothing", None) is None
try:
    from accelerate.utils import Nothing
except ImportError:
    Nothing = None
from accelerate.utils import imports, operations
from accelerate.utils.tqdm import tqdm
from accelerate.commands.config import config_args
assert config_args.__name__ == "accel.commands.config.config_args"
""",
    "what is assigned in the alias is assigned in accel": """
import accel, accelerate
accelerate.notebook_launcher = len
assert accel.notebook_launcher is len
""",
    "what a test replaces is put back": """
import contextlib
from types import SimpleNamespace
from unittest import mock
import accel, accelerate, accel_ops, accelerate.utils
from accel_ops.collectives import broadcast
from accel_state.memory import find_executable_batch_size as original
from pytest import MonkeyPatch

def patch():
    return mock.patch("accelerate.find_executable_batch_size", len)

def patch_object():
    return mock.patch.object(accelerate, "find_executable_batch_size", len)

def monkeypatch():
    patches = MonkeyPatch()
    patches.setattr(accelerate, "find_executable_batch_size", len)
    return contextlib.closing(SimpleNamespace(close=patches.undo))

for way in (patch, patch_object, monkeypatch, patch):
    with way():
        assert accel.find_executable_batch_size is accelerate.find_executable_batch_size is len
        with mock.patch("accel.find_executable_batch_size", max):
            assert accelerate.find_executable_batch_size is accelerate.utils.find_executable_batch_size is max
        assert accel.find_executable_batch_size is accelerate.utils.find_executable_batch_size is len
    assert accel.find_executable_batch_size is accelerate.find_executable_batch_size is original
with mock.patch("accelerate.utils.broadcast") as replaced:
    assert accel_ops.broadcast is accel.utils.broadcast is replaced
assert accel_ops.broadcast is accel.utils.broadcast is broadcast
with mock.patch("accelerate.utils"):
    assert not hasattr(accel.utils, "__path__")
assert accelerate.utils is accel.utils
assert accel.utils.__name__ == "accel.utils"
""",
    "what is assigned in a submodule is what accel calls": """
import accelerate.big_modeling, accel.utils, accel_bigmodel.dispatch
from torch import nn
before = accelerate.big_modeling.check_device_map
accelerate.big_modeling.check_device_map = lambda *_, **__: print("mine")
accelerate.big_modeling.dispatch_model(nn.Linear(1, 1), {"": "cpu"}, force_hooks=True)
accelerate.big_modeling.check_device_map = before
accelerate.big_modeling.dispatch_model(nn.Linear(1, 1), {"": "cpu"}, force_hooks=True)
assert accel_bigmodel.dispatch.check_device_map is accel.utils.check_device_map is before
import accel.utils.tqdm
accel.utils.tqdm.tqdm = print
accel.utils.tqdm("called")
""",
}
"""What runs with torch, in one interpreter, one after the other."""
PRINTED = {"what is assigned in a submodule is what accel calls": "mine\ncalled\n"}
IN_ONE = """
import contextlib, io, json, sys, traceback
told = {}
for name, program in json.loads(sys.argv[1]).items():
    with contextlib.redirect_stdout(io.StringIO()) as output:
        try:
            exec(program, {"__name__": "__main__"})
        except Exception:
            traceback.print_exc(file=output)
    told[name] = output.getvalue()
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def told() -> dict[str, str]:
    """What each program printed, a traceback included."""
    return json.loads(run(INSTALL + IN_ONE, json.dumps(PROGRAMS)))


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_finds_both_names_the_same(name: str, told: dict[str, str]) -> None:
    assert told[name] == PRINTED.get(name, "")


def test_versions_are_those_of_the_interface() -> None:
    program = """
import importlib.metadata, importlib.util
import accel, accelerate
print(accelerate.__version__, importlib.metadata.version("accelerate"))
assert accel.__version__ == accelerate.__version__
assert accel.__accel_version__ == accelerate.__accel_version__ == importlib.metadata.version("accel-suite")
assert "huggingface" in importlib.metadata.metadata("accelerate")["Home-page"]
assert importlib.util.find_spec("accelerate") is not None
assert [dist.version for dist in importlib.metadata.distributions() if dist.name == "accelerate"][:1]
assert "accelerate" in importlib.metadata.packages_distributions()["accelerate"]
"""
    assert run(INSTALL + program) == f"{REFERENCE_VERSION} {REFERENCE_VERSION}"


def test_the_version_is_that_of_the_reference_with_which_the_project_compares() -> None:
    root = Path(__file__).parents[3] / "pyproject.toml"
    if not root.exists():
        pytest.skip("the workspace's pyproject.toml is not here: the package is tested alone")
    groups = tomllib.loads(root.read_text())["dependency-groups"]
    assert groups["reference"] == [f"accelerate=={REFERENCE_VERSION}"]


def test_nothing_is_imported_before_it_is_asked_for() -> None:
    program = "import sys, accelerate, accelerate.utils; print(sorted({'torch', 'numpy'} & set(sys.modules)))"
    assert run(INSTALL + program) == "[]"


def test_the_alias_costs_no_more_than_accel() -> None:
    program = """
import sys
before = set(sys.modules)
import accel
of_accel = set(sys.modules) - before
import accel_compat
accel_compat.install()
import accelerate
print(*sorted(set(sys.modules) - before - of_accel))
"""
    more = set(run(program).split())
    assert {name for name in more if name.partition(".")[0] not in {"accelerate", "accel_compat"}} <= {
        "accel_state.environ",
        "accel_state.errors",
        "importlib._abc",
        "importlib.machinery",
        "importlib.util",
    }


@pytest.mark.parametrize(
    ("statement", "error", "words"),
    [
        ("import accelerate.nowhere", "ModuleNotFoundError", "has no 'accel.nowhere'. Please report"),
        ("from accelerate import Nothing", "ModuleNotFoundError", "has no 'accel.Nothing'. Please report"),
        (
            "from accelerate.utils import Nothing",
            "ModuleNotFoundError",
            "'accel.utils.Nothing'. Please report",
        ),
        (
            "from accelerate.state import Nothing",
            "ModuleNotFoundError",
            "'accel.state.Nothing'. Please report",
        ),
        (
            "from accelerate.test_utils.testing import x",
            "ModuleNotFoundError",
            "'accel.test_utils.testing.x'. Please report",
        ),
        ("import accelerate; accelerate.Nothing", "AttributeError", "has no such name. Please report"),
    ],
)
def test_names_that_accel_lacks_are_errors_that_say_so(statement: str, error: str, words: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", INSTALL + statement], capture_output=True, text=True, check=False
    )
    assert error in done.stderr
    assert words in done.stderr


def test_installing_after_the_reference_was_imported_is_an_error() -> None:
    program = """
import sys, types
sys.modules["accelerate"] = types.ModuleType("accelerate")
import accel_compat
try:
    accel_compat.install()
except ImportError as error:
    print(error)
"""
    assert "came too late" in run(program)


def test_children_that_start_anew_inherit_the_alias(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.seen_by_test = True\n")
    program = f"""
import os, subprocess, sys
os.environ["PYTHONPATH"] = {str(tmp_path)!r}
{INSTALL}
accel_compat.install()
assert os.environ["PYTHONPATH"].count("startup") == 1
child = "import sys, accelerate, accel; print(accelerate.utils is accel.utils, sys.seen_by_test)"
print(subprocess.run([sys.executable, "-c", child], check=True, capture_output=True, text=True).stdout)
"""
    assert run(program) == "True True"


@pytest.mark.parametrize("entry", [r"C:\env\startup", "C:/env/startup", "C:\\env\\startup\\"])
def test_the_file_does_not_find_itself_on_windows(entry: str) -> None:
    program = f"""
import contextlib, importlib.machinery, ntpath, os, pathlib, sys
file = pathlib.Path(importlib.machinery.PathFinder.find_spec("accel_compat").origin)
code = (file.parent / "startup" / "sitecustomize.py").read_text()
sys.modules["accel_compat"] = None
searched = []
importlib.machinery.PathFinder.find_spec = lambda name, path, target=None: searched.extend(path)
os.path, sys.path = ntpath, [{entry!r}, "elsewhere"]
exec(code, {{"__name__": "sitecustomize", "__file__": "C:/env/startup/sitecustomize.py"}})
print(searched)
"""
    assert run(program) == "['elsewhere']"


@pytest.mark.thorough
def test_ranks_that_a_notebook_starts_inherit_the_alias() -> None:
    program = """
from accel import notebook_launcher

def train():
    import accelerate, accelerate.utils, accel
    assert accelerate.Accelerator is accel.Accelerator
    assert accelerate.utils is accel.utils
    return accelerate.Accelerator(cpu=True).num_processes, accelerate.__version__

print(notebook_launcher(train, num_processes=2, use_port=0))
"""  # after what gloo of torch 2.9 prints
    rank = (2, REFERENCE_VERSION)
    assert run(INSTALL + program).splitlines()[-1] == str({0: rank, 1: rank})


@pytest.mark.thorough
def test_ranks_that_are_spawned_inherit_the_alias(tmp_path: Path) -> None:
    (tmp_path / "work.py").write_text(
        "import accelerate, accel\n"
        "def train(rank, folder):\n"
        "    assert accelerate.Accelerator is accel.Accelerator\n"
        "    open(f'{folder}/{rank}', 'w').close()\n"
    )
    program = """
import sys
sys.path.insert(0, sys.argv[1])
if __name__ == "__main__":
    import torch.multiprocessing, work
    torch.multiprocessing.start_processes(work.train, (sys.argv[1],), nprocs=1, start_method="spawn")
"""
    run(INSTALL + program, str(tmp_path))
    assert "0" in {path.name for path in tmp_path.iterdir()}


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_processes_that_read_data_inherit_the_alias(start: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, torch\n"
        "class Names(torch.utils.data.Dataset):\n"
        "    def __len__(self):\n"
        "        return 2\n"
        "    def __getitem__(self, index):\n"
        "        import accelerate.utils.random, accel\n"
        "        assert accelerate.Accelerator is accel.Accelerator\n"
        "        return f'{accelerate.utils.random.__name__} {accelerate.__version__}'\n"
        "if __name__ == '__main__':\n"
        "    loader = torch.utils.data.DataLoader(\n"
        "        Names(), num_workers=1, batch_size=None, multiprocessing_context=sys.argv[1])\n"
        "    print(*loader, sep='\\n')\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "accel_compat", str(script), start],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"accel.utils.random {REFERENCE_VERSION}"] * 2


def test_a_script_and_a_module_run_with_their_arguments(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, accelerate, neighbour\nprint(__name__, sys.argv[1:], accelerate.__version__)\n"
    )
    (tmp_path / "neighbour.py").touch()
    command = [sys.executable, "-m", "accel_compat"]
    wanted = f"__main__ ['--x', '1'] {REFERENCE_VERSION}\n"
    as_script = subprocess.run(
        [*command, str(script), "--x", "1"], capture_output=True, text=True, check=True
    )
    assert as_script.stdout == wanted
    as_module = subprocess.run(
        [*command, "-m", "script", "--x", "1"], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert as_module.stdout == wanted


@pytest.mark.parametrize("program", ["launch", "accelerate_cli"])
def test_commands_that_run_as_modules_are_those_of_accel(program: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import accelerate\nprint(accelerate.state.__name__)\n")
    words = ["launch", "--cpu", "script.py"][program == "launch" :]
    line = [sys.executable, "-m", f"accelerate.commands.{program}", *words]
    done = subprocess.run(
        [sys.executable, "-c", f"{INSTALL}import subprocess; subprocess.run({line!r}, check=True)"],
        env={**os.environ, "HF_HOME": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "accel.state\n"


def test_a_package_of_commands_runs_as_a_module() -> None:
    line = [sys.executable, "-m", "accel_compat", "-m", "accelerate.commands.config", "--help"]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "accel config" in done.stdout


@pytest.mark.parametrize("command", ["config", "estimate", "launch", "merge"])
def test_scripts_that_the_reference_installs_find_their_function(command: str) -> None:
    script = (
        f"{INSTALL}import sys; sys.argv = ['script', '--help']\n"
        f"from accelerate.commands.{command} import main\nsys.exit(main())"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"accel {command}" in done.stdout


def test_without_a_script_the_usage_is_reported() -> None:
    done = subprocess.run([sys.executable, "-m", "accel_compat"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("usage: python -m accel_compat")


@pytest.mark.parametrize("where", ["flag", "variable", "file"])
def test_a_launched_script_and_its_spawned_children_have_the_alias(where: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import multiprocessing, accelerate\n"
        "def told(queue):\n"
        "    import accelerate\n"
        "    queue.put(accelerate.utils.__name__)\n"
        "if __name__ == '__main__':\n"
        "    context = multiprocessing.get_context('spawn')\n"
        "    queue = context.Queue()\n"
        "    child = context.Process(target=told, args=(queue,))\n"
        "    child.start()\n"
        "    print(accelerate.state.__name__, queue.get())\n"
        "    child.join()\n"
    )
    (tmp_path / "config.yaml").write_text("as_accelerate: true\n")
    said = {"flag": ["--as_accelerate"], "variable": [], "file": ["--config_file", "config.yaml"]}[where]
    done = subprocess.run(
        [sys.executable, "-m", "accel_cli", "launch", "--cpu", *said, "script.py"],
        env={**os.environ, "HF_HOME": str(tmp_path)}
        | ({"ACCELERATE_AS_ACCELERATE": "1"} if where == "variable" else {}),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "accel.state accel.utils\n"
