"""The checks of tools/ find what they are there to find."""

from __future__ import annotations

import ast
import sys
from collections import Counter
from typing import TYPE_CHECKING

import pytest

import check
import check_deps
import gen_exports
import glossary
import house_rules
from accel_state.lazy import exports_of

if TYPE_CHECKING:
    from pathlib import Path

SHIPPED = "packages/accel-x/src/accel_x/thing.py"


def breaches(code: str, path: str = SHIPPED) -> list[str]:
    source = house_rules.Source(path, ast.parse(code))
    return [f"{b.rule} {b.subject}" for b in house_rules.check_sources(iter([source]))]


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("import os\nx = os.environ['A']\n", [f"environment {SHIPPED}::environ"]),
        ("import os\nx = os.getenv('A')\n", [f"environment {SHIPPED}::getenv"]),
        ("from os import environ\n", [f"environment {SHIPPED}::import"]),
        ("import os\nx = os.getpid()\n", []),
        ("from accel_state import environ\n", [f"environment-read {SHIPPED}"]),
        ("from accel_state.environ import read\n", [f"environment-read {SHIPPED}"]),
        ("from accel_state.environ import str_to_bool\n", []),
        ("if t == DistributedType.FSDP:\n    pass\n", [f"labels {SHIPPED}::FSDP"]),
        ("if t in (DistributedType.NO, 1):\n    pass\n", [f"labels {SHIPPED}::NO"]),
        ("match t:\n    case DistributedType.NO:\n        pass\n", [f"labels {SHIPPED}::NO"]),
        ("label = DistributedType.NO\n", []),
        ("def f():\n    import torch\n", [f"late-import {SHIPPED}::torch"]),
        ("async def f():\n    from a.b import c\n", [f"late-import {SHIPPED}::a.b"]),
        ("import torch\n", []),
        ("side = torch.cuda.Stream(device)\n", [f"streams {SHIPPED}::torch.cuda.Stream"]),
        ("torch.accelerator.synchronize()\n", [f"streams {SHIPPED}::torch.accelerator.synchronize"]),
        ("batch.pin_memory()\n", [f"streams {SHIPPED}::pin_memory"]),
        ("torch.empty(3, pin_memory=True)\n", [f"streams {SHIPPED}::empty"]),
        ("tensor.record_stream(current)\n", [f"streams {SHIPPED}::record_stream"]),
        ("tensor.copy_(host, non_blocking=True)\n", [f"streams {SHIPPED}::copy_"]),
        ("flag.to(device, non_blocking=True)\n", [f"streams {SHIPPED}::to"]),
        ("send_to_device(batch, device, non_blocking=prefetching)\n", [f"streams {SHIPPED}::send_to_device"]),
        ("tensor.to(device, non_blocking=self.non_blocking)\nx.to(device, non_blocking=False)\n", []),
        ("streams.record_stream(tensor, current)\nstreams.copy_(tensor, host)\n", []),
        ("save_on_cpu(pin_memory=False)\nthreading.Event()\nxm.synchronize()\n", []),
    ],
)
def test_a_house_rule_finds_its_breaches_and_nothing_else(code: str, found: list[str]) -> None:
    assert breaches(code) == found


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ("from torch.utils._pytree import tree_map\n", ["tree_map"]),
        ("from torch.nn.modules.batchnorm import _NormBase\n", ["_NormBase"]),
        ("import torch._utils\n", ["_utils"]),
        ("import torch\ntorch._foreach_mul_(a, module._buffers)\n", []),
        ("from torch_xla._internal import pjrt\n", []),
    ],
)
def test_private_names_of_torch_are_imported_by_one_module(code: str, names: list[str]) -> None:
    assert breaches(code) == [f"torch-private {SHIPPED}::{name}" for name in names]
    assert not breaches(code, "packages/accel-state/src/accel_state/torch_private.py")


def test_variables_are_named_after_their_things() -> None:
    code = "def f(found):\n    return [one.shape for one in found]\n"
    assert breaches(code) == [f"generic-name {SHIPPED}::found", f"generic-name {SHIPPED}::one"]
    assert not breaches(code, "tools/rank.py")
    assert not breaches("class Report:\n    def f(self): self.found = 1\n")


def test_modules_with_vague_names_are_found_and_the_documented_table_is_not() -> None:
    assert breaches("", "packages/accel-x/src/accel_x/utils.py") == [
        "module-name packages/accel-x/src/accel_x/utils.py"
    ]
    assert breaches("", "packages/accel-x/src/accel_x/helpers/walk.py")
    assert not breaches("", "packages/accel-suite/src/accel/utils/environment.py")


def worded(text: str, monkeypatch: pytest.MonkeyPatch, path: str = SHIPPED) -> list[str]:
    words = glossary.Glossary(
        names={"tolled": "reported", "worn_words": "error_tail"},
        prose={"are adrift": "offloaded", "(many|few) hands": "ranks"},
        surface=frozenset({"tolled_twice"}),
    )
    monkeypatch.setattr(house_rules, "load_glossary", lambda: words)
    found = house_rules.glossary(iter([(path, text)]))
    return [f"{one.subject.rpartition('::')[2]} {one.message}" for one in found]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("tolled_so = 1\n", ["tolled_so line 1: say reported"]),
        ("class WornWords: ...\n", ["WornWords line 1: say error_tail"]),
        ("def f(*, is_tolled): ...\n", ["is_tolled line 1: say reported"]),
        ("tolled_twice = stolen = words = print(thing.tolled)\n", []),
        ('x = 1\n"""Weights\nthat are\nadrift."""\n', ["are adrift line 3: say offloaded"]),
        ("x = f'the weights {x} are adrift'\n", ["are adrift line 1: say offloaded"]),
        (
            "# The weights are\n# adrift.\n\n# Many hands.\n",
            ["are adrift line 1: say offloaded", "Many hands line 4: say ranks"],
        ),
        ('"""The weights `are adrift`, they are awake."""\n', []),
        ("def test_they_are_adrift(): ...\n", ["are adrift line 1: say offloaded"]),
        ("def test_it_is_tolled(): ...\n", []),
    ],
)
def test_the_glossary_finds_its_words_in_names_and_prose(
    text: str, found: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert worded(text, monkeypatch) == found


def test_the_glossary_reads_pages_without_their_code(monkeypatch: pytest.MonkeyPatch) -> None:
    page = "# The page\n\n```python\n# they are adrift\n```\n\nWeights\nare adrift, `few hands`.\n"
    assert worded(page, monkeypatch, "packages/accel-x/README.md") == ["are adrift line 8: say offloaded"]


def test_members_with_another_version_or_a_loose_pin_are_found(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "w"\nversion = "2.0"\n')
    for name, version, dependencies in (("a", "1.0", '["b>=2.0", "torch>=2"]'), ("b", "2.0", "[]")):
        folder = tmp_path / "packages" / name
        folder.mkdir(parents=True)
        (folder / "pyproject.toml").write_text(
            f'[project]\nname = "{name}"\nversion = "{version}"\ndependencies = {dependencies}\n'
        )
    assert [breach.subject for breach in house_rules.one_version(tmp_path)] == ["a", "a::b"]


@pytest.mark.parametrize("exceptions", ["", '[late-import]\n"x.py::y" = "once needed"\n'])
def test_an_exception_that_is_no_longer_needed_is_an_error(
    exceptions: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    listed = tmp_path / "house_rules.toml"
    listed.write_text(exceptions)
    monkeypatch.setattr(house_rules, "EXCEPTIONS", listed)
    monkeypatch.setattr(house_rules, "sources", lambda: iter(()))
    monkeypatch.setattr(house_rules, "texts", lambda: iter(()))
    assert house_rules.main() == bool(exceptions)
    assert ("no longer needed" in capsys.readouterr().out) == bool(exceptions)


def test_dependencies_are_compared_both_ways() -> None:
    project = {"name": "a", "dependencies": ["b==1", "numpy>=1"], "optional-dependencies": {"x": ["rich"]}}
    complaints = list(check_deps.compare(project, {"a", "torch", "numpy", "rich"}, {"a", "b"}))
    assert complaints == ["imports torch and does not declare it", "declares b and does not import it"]


def test_imports_of_stubs_count(tmp_path) -> None:
    (tmp_path / "src" / "a").mkdir(parents=True)
    (tmp_path / "src" / "a" / "__init__.py").write_text("import json\nimport b.c\n")
    (tmp_path / "src" / "a" / "__init__.pyi").write_text(
        "from accel_ops.collectives import gather as gather\n"
    )
    assert check_deps.imported(tmp_path, {"accel_ops": ["accel-ops"]}) == {"b", "accel-ops"}


def test_a_function_is_exported_only_if_it_can_be_the_documented_one() -> None:
    entry = {"kind": "function", "parameters": [{"name": "tensor"}, {"name": "skip", "default": "None"}]}
    (shape,) = (
        shape for _, shape in gen_exports.definitions(ast.parse("def f(tensor, skip=None): ...").body[0])
    )
    (other,) = (shape for _, shape in gen_exports.definitions(ast.parse("def f(name): ...").body[0]))
    assert gen_exports.fits(entry, shape)
    assert not gen_exports.fits(entry, other)


def test_a_written_table_is_python_that_exports_its_names() -> None:
    api = {"accel.errors": {"AccelError": "accel_state.errors", **{f"Error{i}": "a.b" for i in range(40)}}}
    text = gen_exports.stub_text("accel.errors", api)
    assert exports_of(text, "accel.errors") == api["accel.errors"]
    assert max(map(len, text.splitlines())) <= 110


@pytest.mark.parametrize(
    ("line", "counts"),
    [
        ("====== 3 failed, 40 passed, 1 skipped in 12.30s ======", {"failed": 3, "passed": 40, "skipped": 1}),
        ("17 passed in 302.10s (0:05:02)", {"passed": 17}),
        ("2 passed, 1 error in 1.00s", {"passed": 2, "error": 1}),
        ("2 errors in 1.00s", {"error": 2}),
        ("All checks passed!", {}),
        ("5 files already formatted", {}),
    ],
)
def test_closing_lines_of_pytest_are_counted(line: str, counts: dict[str, int]) -> None:
    assert check.counted(line) == Counter(counts)


def test_every_step_has_its_own_name() -> None:
    names = [step.name for step in check.STEPS]
    assert len(set(names)) == len(names)
    assert {"format", "lint", "types", "layers", "unit", "integration", "isolation"} <= set(names)


def pytest_step(folder: Path, code: str) -> check.Step:
    test = folder / "test_sample.py"
    test.write_text(f"from pathlib import Path\n\nCOUNT = Path({str(folder / 'runs')!r})\n{code}")
    command = (*check.PYTEST, str(test))
    return check.Step(name="sample", about="a sample", command=command, once_more=check.ONCE_MORE)


def test_a_test_that_passes_when_it_is_run_again_is_flaky_and_its_step_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "ROOT", tmp_path)
    step = pytest_step(
        tmp_path,
        "def test_steady(): pass\n"
        "def test_unsteady():\n"
        "    before = COUNT.exists()\n"
        "    COUNT.touch()\n"
        "    assert before\n",
    )
    result = check.run(step)
    assert result.status == 0
    assert result.tests == Counter(passed=2)
    assert [test.rpartition("::")[2] for test in result.flaky] == ["test_unsteady"]


def test_a_test_that_fails_again_fails_its_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "ROOT", tmp_path)
    result = check.run(pytest_step(tmp_path, "def test_broken(): assert False\n"))
    assert result.status == 1
    assert result.tests == Counter(failed=1)
    assert result.flaky == ()


def test_the_checks_start_again_with_their_libraries_where_uv_run_installed_fewer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert check.restart_command({}, ["--all"]) is None
    command = check.restart_command({"UV": "/bin/uv", "UV_RUN_RECURSION_DEPTH": "1"}, ["--all"])
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert command == ["/bin/uv", "run", "--group", "dev", "--python", python, "tools/check.py", "--all"]
    assert check.restart_command({"UV": "/bin/uv", "UV_RUN_RECURSION_DEPTH": "2"}, []) is None

    monkeypatch.setattr(check.importlib.util, "find_spec", lambda name: None)
    assert check.restart_command({"UV": "/bin/uv", "UV_RUN_RECURSION_DEPTH": "2"}, []) is not None
    monkeypatch.setattr(check.shutil, "which", lambda name: None)
    with pytest.raises(SystemExit, match="pip install uv"):
        check.restart_command({}, [])
