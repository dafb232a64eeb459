"""What the README files say can be installed and was measured."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROJECTS = {
    path.parent.name: tomllib.loads(path.read_text())["project"]
    for path in ROOT.glob("packages/*/pyproject.toml")
}
PAGES = [ROOT / "README.md", *ROOT.glob("packages/*/README.md"), *ROOT.glob("packages/*/docs/**/*.md")]
REQUIREMENT = re.compile(r"(accel-[a-z]+)(?:\[([a-z,-]+)\])?")
RELATIVE = re.compile(r"\]\((?!https?:|#)")


def requirements() -> set[tuple[str, str]]:
    """What follows `pip install` anywhere, with its extras."""
    lines = [line for page in PAGES for line in page.read_text().splitlines() if "pip install" in line]
    return {
        match.groups("") for line in lines for match in REQUIREMENT.finditer(line.split("pip install", 1)[1])
    }


@pytest.mark.parametrize(("name", "extras"), sorted(requirements()))
def test_what_is_to_be_installed_is_there_with_its_extras(name: str, extras: str) -> None:
    assert set(filter(None, extras.split(","))) <= {*PROJECTS[name].get("optional-dependencies", ())}


def test_the_figures_of_the_table_are_among_the_results() -> None:
    results = (ROOT / "tools/benchmarks/RESULTS.md").read_text()
    rows = [
        line.split("|")[2:5]
        for line in (ROOT / "README.md").read_text().splitlines()
        if " s | " in line or re.search(r"\| \d\.\d+ \|", line)
    ]
    assert len(rows) >= 9
    for ours, theirs, script in rows:
        assert (ROOT / f"tools/benchmarks/{script.strip(' `').split()[0]}.py").exists()
        for figure in (ours, theirs):
            assert figure.strip().removesuffix(" s") in results


def test_the_page_of_measurements_has_the_figures_of_the_readme_with_their_ratios() -> None:
    readme = (ROOT / "README.md").read_text()
    page = (ROOT / "packages/accel-suite/docs/reference/measurements.md").read_text()
    lines = [line for line in page.splitlines() if re.search(r"\| [\d.]+x \w", line)]
    rows = [[cell.strip() for cell in line.split("|")[2:6]] for line in lines]
    assert len(rows) == 8
    for ours, theirs, ratio, script in rows:
        assert script.strip("`") in readme
        if "%" not in ours:
            assert f"| {ours} | {theirs} |" in readme
            exact = float(theirs.split()[0]) / float(ours.split()[0])
            assert float(ratio.split("x ")[0]) == pytest.approx(exact, rel=0.02)


@pytest.mark.parametrize("name", sorted(PROJECTS))
def test_a_package_page_on_the_registry_has_no_link_into_the_repository(name: str) -> None:
    assert not RELATIVE.search((ROOT / "packages" / name / "README.md").read_text())


@pytest.mark.parametrize("name", sorted(PROJECTS))
def test_a_package_says_what_the_registry_shows(name: str) -> None:
    project = PROJECTS[name]
    assert project["readme"] == "README.md"
    assert {"Typing :: Typed"} <= {*project["classifiers"]}
    assert "pytorch" in project["keywords"]
    assert f"# {name}" in (ROOT / "packages" / name / "README.md").read_text()
