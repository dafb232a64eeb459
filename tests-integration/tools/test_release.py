"""A release sets one version everywhere, and its tag must be that of the tree."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.version import Version

import house_rules
import release
from accel_state.device_kinds import BY_NAME

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


def deprecations() -> list[tuple[str, dict[str, str]]]:
    """The names that are marked as deprecated, with the arguments of the mark."""
    found: list[tuple[str, dict[str, str]]] = []
    for path in ROOT.glob("packages/*/src/**/*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            for mark in getattr(node, "decorator_list", []):
                if isinstance(mark, ast.Call) and ast.unparse(mark.func).endswith("deprecated"):
                    words = {str(word.arg): ast.literal_eval(word.value) for word in mark.keywords}
                    found.append((getattr(node, "name"), words))  # noqa: B009
    return found


def test_a_deprecated_name_says_since_and_until_and_is_on_the_page_until_it_goes() -> None:
    page = (ROOT / "packages/accel-suite/docs/reference/versions.md").read_text()
    marked = deprecations()
    assert marked
    for name, words in marked:
        assert words.keys() == {"since", "until", "instead"}, name
        since, until = Version(words["since"]), Version(words["until"])
        assert (until.major, until.minor) >= (since.major, since.minor + 2), name
        assert Version(release.current_version(ROOT)) < until, f"{name} is to be removed"
        assert f"| `{name}` | {words['since']} | {words['until']} |" in page
    rows = page.partition("| deprecated name |")[2].partition("\n\n")[0]
    assert rows.count("\n| `") == len(marked)


def test_the_page_of_versions_has_the_limits_of_the_packages() -> None:
    page = (ROOT / "packages/accel-suite/docs/reference/versions.md").read_text()
    state = tomllib.loads((ROOT / "packages/accel-state/pyproject.toml").read_text())["project"]
    assert f"| Python | {state['requires-python'].removeprefix('>=')} to 3.14:" in page
    (floor,) = [line.removeprefix("torch>=") for line in state["dependencies"] if line.startswith("torch>=")]
    assert f"| {floor} and newer |" in page
    assert f"minor versions: {BY_NAME['cuda'].least_torch} to " in page


def write_wheels(tree: Path, folder: Path) -> None:
    """Write a wheel without modules for each package of a tree: its name, its version, and its siblings."""
    for path in tree.glob("packages/*/pyproject.toml"):
        project = tomllib.loads(path.read_text())["project"]
        siblings = [line for line in project.get("dependencies", ()) if line.startswith("accel-")]
        name, version = project["name"].replace("-", "_"), project["version"]
        metadata = [f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {line}" for line in siblings)]
        with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
            info = f"{name}-{version}.dist-info"
            wheel.writestr(f"{info}/METADATA", "\n".join(["Metadata-Version: 2.1", *metadata, ""]))
            wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
            wheel.writestr(f"{info}/RECORD", "")


@pytest.mark.thorough
def test_a_part_of_another_release_beside_the_metapackage_is_said_by_pip(tree: Path, tmp_path: Path) -> None:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    old = release.current_version(tree)
    write_wheels(tree, wheels)
    (tree / "CHANGELOG.md").write_text("# Changelog\n\n## 7.8.9, not released yet\n")
    release.set_version(tree, "7.8.9", "2030-01-02")
    write_wheels(tree, wheels)
    venv.create(tmp_path / "venv", with_pip=True)

    def pip(*requirements: str) -> tuple[int, str]:
        command = [
            tmp_path / "venv/bin/python",
            "-m",
            "pip",
            "install",
            "--no-index",
            f"--find-links={wheels}",
        ]
        done = subprocess.run([*command, *requirements], capture_output=True, text=True, check=False)
        return done.returncode, done.stdout + done.stderr

    code, said = pip(f"accel-suite=={old}", "accel-bigmodel==7.8.9")
    assert code == 1
    assert f"accel-suite {old} depends on accel-bigmodel=={old}" in said
    assert pip(f"accel-suite=={old}")[0] == 0
    _, said = pip("accel-bigmodel==7.8.9")
    assert f"accel-suite {old} requires accel-bigmodel=={old}, but you have accel-bigmodel 7.8.9" in said
