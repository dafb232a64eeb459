"""A release sets one version everywhere, and its tag must be that of the tree."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import house_rules
import release

ROOT = Path(__file__).resolve().parents[2]
MODULE = "packages/accel-suite/src/accel/__init__.py"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    tops = [ROOT / name for name in ("pyproject.toml", "CHANGELOG.md", "CITATION.cff", MODULE)]
    for path in [*tops, *ROOT.glob("packages/*/pyproject.toml")]:
        copy = tmp_path / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    return tmp_path


def test_every_package_has_the_new_version_and_pins_its_siblings_to_it(tree: Path) -> None:
    changelog = tree / "CHANGELOG.md"
    changelog.write_text("# Changelog\n\n## 7.8.9, not released yet\n")
    release.set_version(tree, "7.8.9", "2030-01-02")
    assert release.current_version(tree) == "7.8.9"
    assert not [*house_rules.one_version(tree)]
    assert "\nversion: 7.8.9\n" in (tree / "CITATION.cff").read_text()
    assert '__accel_version__ = "7.8.9"' in (tree / MODULE).read_text()
    assert changelog.read_text() == "# Changelog\n\n## 7.8.9, 2030-01-02\n"


def test_a_release_that_the_changelog_does_not_describe_is_refused(tree: Path) -> None:
    before = (tree / "pyproject.toml").read_text()
    with pytest.raises(SystemExit, match=r"has no line '## 7\.8\.9, not released yet'"):
        release.set_version(tree, "7.8.9", "2030-01-02")
    assert (tree / "pyproject.toml").read_text() == before


def test_a_tag_of_another_version_is_refused() -> None:
    done = subprocess.run(
        [sys.executable, "tools/release.py", "--check", "v7.8.9"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert f"the tree has {release.current_version(ROOT)}" in done.stdout
