from __future__ import annotations

from types import SimpleNamespace

import pytest

from accel_cli.commands import examples
from accel_cli.main import main


@pytest.fixture
def suite(monkeypatch, tmp_path):
    """An installed accel-suite with one example."""
    module = tmp_path / "site/accel"
    (module / "_examples/by_feature/__pycache__").mkdir(parents=True)
    (module / "_examples/by_feature/memory.py").write_text("print(1)")
    (module / "_examples/by_feature/__pycache__/memory.pyc").write_text("")
    (module / "_docs/guides").mkdir(parents=True)
    (module / "_docs/index.md").write_text("# accel")
    (module / "_docs/guides/fsdp.md").write_text("# FSDP")
    monkeypatch.setattr(examples, "find_spec", lambda name: SimpleNamespace(origin=module / "__init__.py"))


@pytest.mark.usefixtures("suite")
def test_the_examples_are_copied_without_compiled_files(tmp_path, capsys):
    (tmp_path / "mine").mkdir()
    assert main(["examples", str(tmp_path / "mine")]) == 0
    files = [path.relative_to(tmp_path) for path in (tmp_path / "mine").rglob("*") if path.is_file()]
    assert [str(path) for path in files] == ["mine/by_feature/memory.py"]
    assert "Copied 1 scripts" in capsys.readouterr().out


@pytest.mark.usefixtures("suite")
def test_the_documentation_is_copied_beside_the_examples(tmp_path, capsys):
    assert main(["examples", str(tmp_path / "mine"), "--docs"]) == 0
    pages = [path.relative_to(tmp_path) for path in sorted((tmp_path / "mine").rglob("*.md"))]
    assert [str(path) for path in pages] == ["mine/docs/guides/fsdp.md", "mine/docs/index.md"]
    assert "mine/docs/index.md" in capsys.readouterr().out


@pytest.mark.usefixtures("suite")
@pytest.mark.parametrize("name", ["folder", "file"])
def test_nothing_that_exists_is_overwritten(tmp_path, capsys, name):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/mine.py").write_text("precious")
    (tmp_path / "file").write_text("precious")
    assert main(["examples", str(tmp_path / name)]) == 2
    assert "exists and is not empty" in capsys.readouterr().err
    assert sorted(path.name for path in (tmp_path / "folder").iterdir()) == ["mine.py"]


def test_without_accel_suite_the_error_has_the_line_that_installs_it(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(examples, "find_spec", lambda name: None)
    assert main(["examples", str(tmp_path / "new")]) == 2
    assert "pip install accel-suite" in capsys.readouterr().err
